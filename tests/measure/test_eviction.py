"""Evictions in the measuring loop: what stays, what it takes, what is read after it, and what must not pass."""

from __future__ import annotations

import pytest
import torch

from kvlab.attention.named import EVICTIONS, Latent, mechanism
from kvlab.core.errors import CapabilityError, CodecNotActive, Fault, UnknownName, UserError
from kvlab.core.recipe import IDENTITY, Cell
from kvlab.engines.base import Engine, Left, gone_from
from kvlab.measure import mechanism as mechanisms
from kvlab.measure.eviction import EvictingCoder, last_attention
from kvlab.measure.mechanism import extremes, mechanism_variant, over_kept
from kvlab.measure.quick_run import score
from kvlab.measure.scoring import WindowRun
from kvlab.text import corpus
from kvlab.witness.plain import PlainModel
from refusals import refused


@pytest.fixture(scope="module")
def run(hf_engine, tiny_windows) -> WindowRun:
    windows = corpus.load(tiny_windows, hf_engine.info.model_hash)
    return WindowRun(hf_engine, windows.test[0].tolist(), windows.context, 3)


def coder_of(engine, name: str, dtype=None) -> EvictingCoder:
    cell = Cell(
        study="cells", label=name, engine="hf", dtype="float32", protocol="snapshot", origin="hf", stream="kv",
        layers=tuple(range(engine.info.n_layers)), windows=1, recipe=IDENTITY,
    )  # fmt: skip
    return EvictingCoder(cell, mechanism(name), lambda n: engine.rotation(n, 0), dtype)


@pytest.mark.parametrize("last", [1, 3])
def test_the_last_queries_are_those_of_a_softmax_written_out(last):
    """Each over its own past: what comes after a query gets nothing of it."""
    torch.manual_seed(0)
    q, k = torch.randn(4, 9, 8), torch.randn(2, 9, 8)
    due = torch.zeros(4, last, 9)
    for head in range(4):
        for place, t in enumerate(range(9 - last, 9)):
            due[head, place, : t + 1] = (q[head, t] @ k[head // 2, : t + 1].T / 8**0.5).softmax(-1)
    mean = due.mean((0, 1))
    pooled = [mean[max(0, i - 3) : i + 4].max() for i in range(9)]
    for given in (q, q[:, -last:]):
        got = last_attention(lambda x: x, given, k, last=last)
        assert torch.allclose(got / got.max(), (torch.tensor(pooled) / max(pooled)).double(), atol=1e-6)


def test_fewer_tokens_take_fewer_bytes_and_cost_more(run, hf_engine):
    kl, sizes = [], []
    for kept in (run.context, run.context // 2, 1):
        coder = coder_of(hf_engine, f"sinks:kept={kept},sinks=0")
        logits, held = over_kept(run, coder)
        assert gone_from(held) == run.context - kept
        kl.append(float(run.rows("x", logits, run.over_clean)["kl"].mean()))
        sizes.append(coder.tally.coded_bytes)
    assert kl[0] < 1e-9 < kl[1] < kl[2]
    whole = sum(x.nbytes for x in run.clean["pre_rope"].kept.values())
    assert sizes[0] == 2 * sizes[1] == run.context * sizes[2] == whole


def test_places_are_paid_for_where_they_have_to_be_stored(run, hf_engine):
    layers, sizes = hf_engine.info.n_layers, []
    for name in ("sinks:kept=8", "small_keys:kept=8,recent=4"):
        coder = coder_of(hf_engine, name, torch.bfloat16)
        over_kept(run, coder)
        sizes.append(coder.tally.coded_bytes)
    assert sizes[0] == 8 * 2 * hf_engine.info.values_per_token and sizes[1] == sizes[0] + 8 * 2 * layers


@pytest.mark.parametrize("policy", EVICTIONS)
def test_sinks_and_the_last_tokens_stay(run, hf_engine, policy):
    settings = "kept=16,sinks=2" + (",recent=4" if policy != "sinks" else "")
    for kept in run.snapshot(*(lambda coder: (coder.cell, coder))(coder_of(hf_engine, f"{policy}:{settings}"))).places:
        assert len(kept) == 16 and kept[:2].tolist() == [0, 1]
        assert kept[-4:].tolist() == list(range(run.context - 4, run.context))


@pytest.mark.parametrize("policy", ["small_keys", "attention"])
def test_what_is_written_over_it_is_what_is_scored_over_it(run, hf_engine, policy):
    """Token by token, from a right draft and from a wrong one: positions go on where the context ended."""
    coder = coder_of(hf_engine, f"{policy}:percent=25,sinks=2,recent=8")
    prompt, held = run.ids[: run.context + 1], run.snapshot(coder.cell, coder)
    written = hf_engine.write_over(prompt, held, 6)
    again = hf_engine.score_over([*prompt, *written], held).argmax(-1).tolist()
    assert again == written
    for draft in (written, [*written[:2], (written[2] + 1) % 50, *written[3:]]):
        assert hf_engine.write_over(prompt, held, 6, draft) == written


def test_an_engine_that_computes_every_token_says_so(run, hf_engine):
    coder = coder_of(hf_engine, "sinks:kept=8")
    held = run.snapshot(coder.cell, coder)
    assert isinstance(held, Left)
    with refused(Fault, "fault.no-eviction"):
        Engine.score_over(hf_engine, run.ids, held)


@pytest.mark.parametrize("policy", EVICTIONS)
def test_it_is_measured_and_computed_again(hf_engine, tiny_windows, policy):
    windows = corpus.load(tiny_windows, hf_engine.info.model_hash)
    asked = mechanism(f"{policy}:percent=50,sinks=2" + (",recent=8" if policy != "sinks" else ""))
    rows = windows.test[:1]
    (found,) = score(
        hf_engine, rows, windows.context, [], lambda: PlainModel(hf_engine.info.path),
        [mechanism_variant(asked, hf_engine, "snapshot")],
    )  # fmt: skip
    assert found.tokens["kl"].mean() > 0 and found.witnessed == found.witnessed_kl < 1e-5
    half = pytest.approx(hf_engine.info.values_per_token, rel=0.05)  # of two bytes a number
    assert found.cost.stored == half and found.cost.coding is None


def test_one_that_keeps_everything_or_does_not_reach_attention_is_refused(hf_engine, tiny_windows, monkeypatch):
    windows = corpus.load(tiny_windows, hf_engine.info.model_hash)
    run = WindowRun(hf_engine, windows.test[0].tolist(), windows.context, 0)
    found = extremes(mechanism("sinks:kept=8,sinks=0"), hf_engine.info, windows.context)
    caught = ((found[::-1], Fault, "fault.floor"), (found[:1] * 2, CodecNotActive, "not-active.canary"))
    for pair, error, code in caught:
        monkeypatch.setattr(mechanisms, "extremes", lambda *_, pair=pair: pair)
        with refused(error, code, "sinks:kept=8"):
            mechanism_variant(mechanism("sinks:kept=8"), hf_engine, "snapshot").canary(run)


def test_it_is_of_finished_contexts_on_transformers(hf_engine):
    assert "no pattern" not in mechanisms.not_run(mechanism("sinks:kept=8"), "vllm", "snapshot", hf_engine.info)
    with refused(CapabilityError, "capability.not-run", "attention:kept=8", "in_forward"):
        mechanism_variant(mechanism("attention:kept=8"), hf_engine, "in_forward")


@pytest.mark.parametrize(
    ("name", "error", "code", "data"),
    [
        ("sinks", UserError, "user.no-budget", ("sinks: ",)),
        ("sinks:kept=3,percent=10", UserError, "user.no-budget", ("sinks:kept=3,percent=10",)),
        ("attention:percent=100", UserError, "user.no-budget", ("attention:percent=100", "below 100")),
        ("small_keys:kept=0", UserError, None, ("small_keys:kept=0", "1 or more")),
        ("sinks:kept=4,recent=3", UnknownName, None, ("setting of sinks", "'recent'")),
        ("atention:kept=4", UnknownName, None, ("'atention'", "'attention'")),
    ],
)
def test_names_that_say_no_eviction(name, error, code, data):
    with refused(error, code, *data):
        mechanism(name)


def test_more_queries_than_are_kept_are_refused(hf_engine):
    with refused(UserError, None, "recent is 65", "at most 64"):
        coder_of(hf_engine, "attention:kept=90,recent=65")


def test_names_tell_all_settings():
    assert mechanism("sinks:kept=8").told == "sinks:kept=8,sinks=4"
    assert mechanism("attention:percent=8").told == "attention:percent=8,sinks=4,recent=32"
    assert Latent("x", 7).told == "latent:rank=7,sinks=4"
    assert mechanism("attention:percent=10").budget(55) == 5 and mechanism("sinks:kept=90").budget(55) == 55
