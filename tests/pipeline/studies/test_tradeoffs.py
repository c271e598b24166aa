"""The study of tradeoffs: bytes by their formulas, evictions with a planted loss, a run on the tiny model, its page."""

from __future__ import annotations

import pytest

from kvlab.attention.named import PLACE, numbered
from kvlab.core.errors import ParamsError, StorageError, UserError
from kvlab.core.params import Params
from kvlab.core.records import read_json, write_json
from kvlab_pipeline.studies import page
from kvlab_pipeline.studies.record import read_record
from kvlab_pipeline.studies.tradeoffs import record as records
from kvlab_pipeline.studies.tradeoffs import tables
from kvlab_pipeline.studies.tradeoffs.arms import FULL, CacheShape, arms, kept_at, rank_at, recipes_of
from kvlab_pipeline.studies.tradeoffs.measure import measure, refuse
from kvlab_pipeline.studies.tradeoffs.params import Tradeoffs
from pipeline.studies.printed import whole
from refusals import refused
from text.test_needles import with_changes

pytestmark = pytest.mark.nightly  # a page that FINDINGS.md does not need

SHAPE = CacheShape(layers=3, kv_heads=2, head_dim=32, context=64)
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
    return read_record(written, records.RECORD, "tradeoffs")


class TestBudgets:
    @pytest.mark.parametrize("policy", ["sinks", "attention"])
    @pytest.mark.parametrize("budget", [1.0, 2.5, 4.5, 15.9])
    def test_as_many_tokens_as_fit_and_no_more(self, policy, budget):
        def bits(kept: int) -> float:
            return kept * (FULL * SHAPE.numbers + 8 * PLACE * numbered(policy)) / (SHAPE.numbers * SHAPE.context)

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
        with refused(UserError, "user.too-many-steps", "tradeoffs.steps", steps, scored - 2):
            refuse(asked)

    def test_sinks_that_leave_no_other_token(self, tiny_params):
        context = tiny_params.windows.context
        with refused(ParamsError, None, "tradeoffs.sinks", context, context - 1):
            with_changes(tiny_params, tradeoffs={"sinks": context})


class TestARun:
    def test_every_arm_is_there_and_a_second_computation_agrees(self, found, asks):
        assert {one.family for one in found.arms} == FAMILIES
        assert all(one.kl.n_windows == 2 and one.found.n_windows == 2 for one in found.arms)
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
        assert whole("tradeoffs", found, tables.parts(found))
        drawn = tables.figure(found)
        assert len(drawn.marks) == 2 * (len(found.arms) + len(found.drafted))

    def test_a_model_is_named_once(self, written, tmp_path):
        with refused(UserError, None, "reference"):
            page.write("tradeoffs", [written, written], tmp_path / "REPORT.md")
        assert not list(tmp_path.iterdir())

    def test_several_models_have_a_heading_each(self, found):
        other = found.model_copy(update={"provenance": found.provenance.model_copy(update={"model": "other"})})
        said = page.rendered("tradeoffs", [found, other], {}).splitlines()
        assert [line for line in said if line.startswith("## ")] == [f"## {found.model}", "## other"]
        alone = page.rendered("tradeoffs", [found], {}).splitlines()
        sections = [line.removeprefix("#") for line in said if line.startswith("### ")]
        assert sections == 2 * [line for line in alone if line.startswith("## ")]

    def test_a_record_without_its_arms_is_refused(self, written, tmp_path):
        other = read_json(written)
        del other["arms"]
        write_json(tmp_path / "other.json", other)
        with refused(StorageError, "storage.no-record", tmp_path / "other.json"):
            read_record(tmp_path / "other.json", records.RECORD, "tradeoffs")
