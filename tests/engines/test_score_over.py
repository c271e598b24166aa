"""A window's tokens scored over a context's given K and V: the same as one pass where these are the model's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch

from kvlab.core.errors import Fault, UnknownName
from kvlab.core.recipe import Placement
from kvlab.core.records import SAME
from kvlab.engines.base import ContextCache, Engine
from kvlab.measure.coding import CleanCapture
from kvlab.measure.scoring import WindowRun
from kvlab.stats.divergences import token_record
from refusals import refused

IDS = torch.randint(0, 320, (96,), generator=torch.Generator().manual_seed(2)).tolist()
CONTEXT = 64
SPANS = {  # context, whole window; the tests below say what each is for
    "window": (CONTEXT, 96),
    "uneven": (41, 96),
    "short": (CONTEXT, CONTEXT + 7),
    "one token": (1, 96),
    "one label": (CONTEXT, CONTEXT + 2),
}
ROUNDING = 1e-9  # nats per token between two float32 computations of the same
PLACEMENTS = get_args(Placement)
ENGINES = ["hf_engine", pytest.param("vllm_engine", marks=pytest.mark.engine)]
AVX512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="vLLM reads an fp8 cache with AVX-512 only"
)
USER = Path(__file__).with_name("fp8_user.py")


@pytest.fixture(params=ENGINES)
def engine(request) -> Engine:
    """Each engine of the session."""
    return request.getfixturevalue(request.param)


def captured(engine: Engine, ids: list[int], context: int, placement: str) -> ContextCache:
    """The context's clean K and V, as the lab takes them."""
    clean = CleanCapture(context)
    engine.score(ids, context, clean, placement)
    return clean.kept


def perturbed(cache: ContextCache) -> ContextCache:
    """The cache with noise on every tensor, of another seed in each: none is interchangeable."""
    moved = {}
    for number, (key, x) in enumerate(sorted(cache.items())):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(number), dtype=x.dtype)
        moved[key] = x + 0.3 * noise.to(x.device)
    return moved


def kl(reference: torch.Tensor, other: torch.Tensor, ids: list[int], context: int) -> float:
    """The largest KL of the window's scored tokens, in nats."""
    return float(token_record(reference, other, torch.tensor(ids[context + 1 :]))["kl"].max())


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("span", SPANS)
def test_over_its_own_clean_cache_an_engine_scores_as_in_one_pass(engine, span, placement):
    context, tokens = SPANS[span]
    ids = IDS[:tokens]
    logits = engine.score_over(ids, captured(engine, ids, context, placement), placement)
    reference = engine.score(ids, context)
    assert logits.shape == reference.shape == (tokens - 1 - context, engine.info.vocab_size)
    assert kl(reference, logits, ids, context) < ROUNDING


@pytest.mark.engine
def test_the_uneven_context_ends_within_a_block_of_vllm(vllm_engine):
    """What the test above relies on; its other contexts may end with a block."""
    block_size = vllm_engine._loaded.llm.llm_engine.vllm_config.cache_config.block_size
    assert SPANS["uneven"][0] % block_size and SPANS["uneven"][0] % 16


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("span", SPANS)
def test_so_it_does_over_another_cache_and_as_a_full_pass_with_a_tap_does(engine, span, placement):
    """The base class's way, which computes the context too, is the oracle: every tensor arrives at its own place."""
    context, tokens = SPANS[span]
    ids = IDS[:tokens]
    clean = captured(engine, ids, context, placement)
    for cache in (clean, perturbed(clean)):
        oracle = Engine.score_over(engine, ids, cache, placement)
        assert kl(oracle, engine.score_over(ids, cache, placement), ids, context) < ROUNDING


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_tensor_of_the_cache_moves_the_logits(engine, placement):
    clean = captured(engine, IDS, CONTEXT, placement)
    moved = perturbed(clean)
    reference = engine.score(IDS, CONTEXT)
    assert (engine.score_over(IDS, moved, placement) - reference).abs().max() > 0.1
    for key in clean:
        assert kl(reference, engine.score_over(IDS, clean | {key: moved[key]}, placement), IDS, CONTEXT) > 1e-6, key


@pytest.mark.engine
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_both_engines_say_the_same_over_the_same_cache(hf_engine, vllm_engine, placement):
    moved = perturbed(captured(hf_engine, IDS, CONTEXT, placement))
    on_cpu = {key: x.cpu() for key, x in moved.items()}
    ours, theirs = (one.score_over(IDS, on_cpu, placement) for one in (hf_engine, vllm_engine))
    assert kl(ours, theirs.to(ours.device), IDS, CONTEXT) < 1e-6  # two engines, as in the baseline


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_tensors_given_stay_as_they_are_and_nothing_stays_in_the_engine(engine, placement):
    moved = perturbed(captured(engine, IDS, CONTEXT, placement))
    before = {key: x.clone() for key, x in moved.items()}
    plain = engine.score(IDS, CONTEXT)
    first = engine.score_over(IDS, moved, placement)
    assert all(torch.equal(moved[key], x) for key, x in before.items())
    assert torch.equal(engine.score(IDS, CONTEXT), plain)
    assert torch.equal(engine.score_over(IDS, moved, placement), first)


def test_an_unknown_placement_is_refused(engine):
    cache = captured(engine, IDS, CONTEXT, "post_rope")
    with refused(UnknownName, None, "placement 'postrope'", "did you mean 'post_rope'"):
        engine.score_over(IDS, cache, "postrope")


@pytest.mark.engine
def test_a_context_that_vllm_computes_itself_is_no_measurement(vllm_engine, monkeypatch):
    """A connector that brings nothing: vLLM then computes the context, and over the clean one nobody would notice."""
    from kvlab.core.errors import CodecNotActive
    from kvlab.engines.vllm.prefix import PrefixConnector

    cache = captured(vllm_engine, IDS, CONTEXT, "post_rope")
    with (
        monkeypatch.context() as patch,
        refused(CodecNotActive, "not-active.several-steps", "32 tokens"),
    ):
        patch.setattr(PrefixConnector, "get_num_new_matched_tokens", lambda *_: (0, False))
        vllm_engine.score_over(IDS, cache, "post_rope")
    assert kl(vllm_engine.score(IDS, CONTEXT), vllm_engine.score_over(IDS, cache, "post_rope"), IDS, CONTEXT) < ROUNDING


# ------------------------------------------------------------------------------ what the lab makes of it


@dataclass
class Planted:
    """An engine with `score_over` as a test plants it: (engine, ids, cache) -> logits."""

    engine: Engine
    planted: object

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def score_over(self, ids, cache, placement="pre_rope"):
        return self.planted(self.engine, ids, cache)

    def score_over_heard(self, ids, cache, placement="pre_rope"):
        return self.score_over(ids, cache, placement), None


def without_context(engine, ids, cache):
    """Ignores the cache: the tokens after the context are all that there is."""
    return engine.score(ids[cache[0, "k"].shape[1] :], 0)


def over_nothing(engine, ids, cache):
    """Ignores what the cache holds: attention reads zeros."""
    return engine.score_over(ids, {key: torch.zeros_like(x) for key, x in cache.items()})


def layer_missing(engine, ids, cache):
    """Ignores one tensor of the cache."""
    return engine.score_over(ids, {**cache, (1, "v"): torch.zeros_like(cache[1, "v"])})


@pytest.mark.parametrize("ignoring", [without_context, over_nothing, layer_missing])
def test_an_engine_that_ignores_the_cache_is_refused(hf_engine, ignoring):
    run = WindowRun(Planted(hf_engine, ignoring), IDS, CONTEXT, 5)
    with refused(Fault, "fault.two-passes", "hf in float32", "window 5", "allowed: 1e-06"):
        _ = run.over_clean


def test_one_that_reads_it_is_what_snapshots_are_held_against(engine):
    run = WindowRun(engine, IDS, CONTEXT, 0)
    assert kl(run.reference, run.over_clean, IDS, CONTEXT) < ROUNDING < SAME["float32"]
    assert run.over_clean is run.over_clean  # one pass for all cells of the window


# ------------------------------------------------------------------------------ two engines of vLLM in one process


@pytest.mark.nightly
@pytest.mark.engine
@AVX512
def test_it_stays_right_beside_a_second_vllm_with_another_cache(tiny_model, root):
    """vLLM makes one worker's half of a KV connector per process: the later engine's would take its place."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root / "tests")])}
    ended = subprocess.run(
        [sys.executable, USER, tiny_model], capture_output=True, text=True, env=environment, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["storage"] == {"plain": "float32", "fp8": "fp8_e4m3"}
    for placement in PLACEMENTS:
        alone, beside, after = (found[placement][when] for when in ("alone", "beside", "after"))
        assert max(alone["clean"], beside["clean"], after["clean"]) < ROUNDING
        assert max(alone["moved"], beside["moved"], after["moved"]) < ROUNDING  # against a full pass with a tap
        assert found[placement]["effect"] > 1e-3
        assert found[placement]["unchanged"]
    assert found["fp8 effect"] > 1e-6  # its cache holds other numbers, so the two can be told apart
