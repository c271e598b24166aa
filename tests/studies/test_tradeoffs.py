"""The study of tradeoffs: bytes by their formulas, evictions with a planted loss, a run on the tiny model, its page."""

from __future__ import annotations

import pytest
import torch

from kvlab.base.errors import ParamsError, StorageError, UserError
from kvlab.base.params import Params
from kvlab.base.records import read_json, write_json
from kvlab.lab.scoring import WindowRun
from kvlab.studies import page
from kvlab.studies.tradeoffs import record as records
from kvlab.studies.tradeoffs import tables
from kvlab.studies.tradeoffs.arms import FULL, PLACE, Arm, Shape, arms, kept_at, numbered, rank_at, recipes_of
from kvlab.studies.tradeoffs.evicted import Evicted, LastQueries, last_attention, over_kept
from kvlab.studies.tradeoffs.measure import measure, refuse
from kvlab.studies.tradeoffs.params import Tradeoffs
from kvlab.text import corpus
from text.test_needles import with_changes

SHAPE = Shape(layers=3, kv_heads=2, head_dim=32, context=64)
FAMILIES = {"codec", "eviction", "latent", "latent x codec", "sparse reading", "codec x sparse reading"}


@pytest.fixture(scope="module")
def asks(tiny_params) -> Params:
    settings = Tradeoffs(
        windows=2, codecs=("klt", "hadamard"), bits=(2, 4), rival_bits=(4,), budgets=(6.0,), sinks=2, recent=4,
        policies=("sinks", "small_keys", "attention"), sparse=("block_sparse:block=4,top_k=2,window=8",),
        combined=(4,), needles=2, drafters=("hadamard",), prompts=2, tokens=4, draft=2, steps=3,
    )  # fmt: skip
    return tiny_params.model_copy(update={"tradeoffs": settings})


@pytest.fixture(scope="module")
def written(asks, tiny_windows, tiny_fitted, tmp_path_factory):
    out = tmp_path_factory.mktemp("tradeoffs") / "tiny.json"
    measure(asks, tiny_windows, None, tiny_fitted, out)
    return out


@pytest.fixture(scope="module")
def found(written):
    return records.read(written)


class TestBudgets:
    @pytest.mark.parametrize("policy", ["sinks", "attention"])
    @pytest.mark.parametrize("budget", [1.0, 2.5, 4.5, 15.9])
    def test_as_many_tokens_as_fit_and_no_more(self, policy, budget):
        def bits(kept: int) -> float:
            return kept * (FULL * SHAPE.numbers + PLACE * numbered(policy)) / (SHAPE.numbers * SHAPE.context)

        kept = kept_at(budget, policy, SHAPE)
        assert bits(kept) <= budget < bits(kept + 1)

    @pytest.mark.parametrize("budget", [2.5, 4.5, 15.0])
    def test_a_rank_fits_beside_the_whole_tokens(self, budget):
        def numbers(rank: int) -> int:
            return 4 * SHAPE.numbers + (SHAPE.context - 4) * rank

        rank, room = rank_at(budget, 4, SHAPE), budget * SHAPE.numbers * SHAPE.context / FULL
        assert numbers(rank) <= room < numbers(rank + 1)

    def test_names_tell_arms_apart_and_recipes_are_those_that_run(self, asks):
        listed = arms(asks, SHAPE)
        assert len({one.name for one in listed}) == len(listed)
        assert {one.family for one in listed} == FAMILIES
        assert {one.recipe.recipe_id for one in listed if one.recipe} <= {one.recipe_id for one in recipes_of(asks)}


class TestRefusals:
    @pytest.mark.parametrize(("steps", "scored"), [(200, 128), (12, 8)])
    def test_steps_that_no_window_can_time(self, tiny_params, steps, scored):
        asked = with_changes(tiny_params, tradeoffs={"steps": steps}, windows={"eval": scored})
        with pytest.raises(UserError, match=rf"tradeoffs\.steps is {steps}; allowed: at most {scored - 2}, as"):
            refuse(asked)

    def test_sinks_that_leave_no_other_token(self, tiny_params):
        context = tiny_params.windows.context
        with pytest.raises(ParamsError, match=rf"tradeoffs\.sinks is {context}; allowed: at most {context - 1}"):
            with_changes(tiny_params, tradeoffs={"sinks": context})


class TestEvictions:
    @pytest.fixture(scope="class")
    def run(self, hf_engine, tiny_windows):
        windows = corpus.load(tiny_windows, hf_engine.info.model_hash)
        return WindowRun(hf_engine, windows.test[0].tolist(), windows.context, 3)

    @pytest.mark.parametrize("last", [1, 3])
    def test_the_last_queries_are_those_of_a_softmax_written_out(self, last):
        """Each over its own past: what comes after a query gets nothing of it."""
        torch.manual_seed(0)
        q, k = torch.randn(4, 9, 8), torch.randn(2, 9, 8)
        due = torch.zeros(4, last, 9)
        for head in range(4):
            for place, t in enumerate(range(9 - last, 9)):
                due[head, place, : t + 1] = (q[head, t] @ k[head // 2, : t + 1].T / 8**0.5).softmax(-1)
        mean = due.mean((0, 1))
        pooled = [mean[max(0, i - 3) : i + 4].max() for i in range(9)]
        got = last_attention(lambda x: x, q, k, last=last)
        assert torch.allclose(got / got.max(), (torch.tensor(pooled) / max(pooled)).double(), atol=1e-6)

    def test_fewer_tokens_take_fewer_bytes_and_cost_more(self, run, hf_engine):
        held, kl, sizes = run.clean["pre_rope"].kept, [], []
        for n in (run.context, run.context // 2, 1):
            last = [torch.arange(run.context - n, run.context)] * hf_engine.info.n_layers
            logits, size = over_kept(hf_engine, run.ids, held, last)
            kl.append(float(run.rows("x", logits, run.over_clean)["kl"].mean()))
            sizes.append(size)
        assert kl[0] < 1e-9 < kl[1] < kl[2]
        assert sizes[0] == 2 * sizes[1] == run.context * sizes[2] == sum(x.nbytes for x in held.values())

    @pytest.mark.parametrize("policy", ["sinks", "small_keys", "attention"])
    def test_sinks_and_the_last_tokens_stay(self, run, hf_engine, policy):
        arm = Arm("x", "eviction", policy=policy, kept=16)
        subject = Evicted(arm, hf_engine, run.context, LastQueries(hf_engine, 4), 2, 4)
        for kept in subject.places(run, run.clean["pre_rope"].kept, 16):
            assert len(kept) == 16 and kept[:2].tolist() == [0, 1]
            assert kept[-4:].tolist() == list(range(run.context - 4, run.context))


class TestARun:
    def test_every_arm_is_there_and_a_second_computation_agrees(self, found, asks):
        assert {one.family for one in found.arms} == FAMILIES
        assert all(one.kl.n == 2 and one.found.n == 2 for one in found.arms)
        assert all(one.witnessed is not None for one in found.arms if one.family not in ("codec",))

    def test_bytes_follow_the_formulas(self, found):
        by_family = {}
        for one in found.arms:
            by_family.setdefault(one.family, []).append(one)
        for one in (*by_family["eviction"], *by_family["latent"]):
            assert 8 * one.stored / found.values <= 6.0
        (pattern,), (coded,) = by_family["sparse reading"], by_family["codec x sparse reading"]
        (codec,) = [one for one in found.arms if one.name == "klt 4"]
        index = pattern.stored - found.full
        assert index > 0 and coded.stored == pytest.approx(codec.stored + index)
        assert pattern.read < found.full_read and coded.read < pattern.read and pattern.stored > found.full

    def test_a_mechanism_with_a_known_loss_has_a_greater_one(self, found):
        kl = {one.name: one.kl.value for one in found.arms}
        assert kl["klt 2"] > kl["klt 4"]
        (latent,) = (one for one in found.arms if one.family == "latent x codec")
        assert latent.kl.value > 0

    def test_drafts_are_accepted_as_a_share_and_both_caches_are_stored(self, found):
        (one,) = found.drafted
        assert 0 <= one.accepted.value <= 1 and 1 <= one.tokens_per_call <= 3
        assert one.stored > found.full
        assert one.read(10.0) == pytest.approx((2 * one.coded + one.exact) * 10 / one.tokens_per_call)

    def test_an_arm_is_held_against_the_widest_leading_codec_that_stores_no_more(self, found):
        stored = {one.name: one.stored for one in found.arms}
        for one in found.arms:
            if one.rival:
                able = [name for name in ("klt 2", "klt 4") if stored[name] <= one.stored]
                assert one.rival == max(able, key=stored.get)

    def test_the_page_has_every_arm_and_the_figure_every_mark(self, written, found, tmp_path):
        page.write("tradeoffs", [written], tmp_path / "REPORT.md")
        said = (tmp_path / "REPORT.md").read_text()
        assert all(f"`{one.name}`" in said for one in found.arms)
        assert (tmp_path / f"{found.model}.svg").read_text().count("<svg") == 1
        assert f"]({found.model}.svg)" in said
        drawn = tables.figure(found)
        assert len(drawn.marks) == 2 * (len(found.arms) + len(found.drafted))

    def test_a_record_of_something_else_is_refused(self, written, tmp_path):
        other = read_json(written)
        del other["arms"]
        write_json(tmp_path / "other.json", other)
        with pytest.raises(StorageError, match="no record of the study of tradeoffs"):
            records.read(tmp_path / "other.json")
