"""The tap after the rotary embedding: what it sees, that it changes nothing by itself, and what it may change."""

from __future__ import annotations

import pytest
import torch

import tiny
from kvlab.core.errors import UnknownName
from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.engines.registry import start
from kvlab.measure.coding import CleanCapture
from kvlab.measure.scoring import WindowRun
from refusals import refused

IDS = torch.randint(0, 320, (96,), generator=torch.Generator().manual_seed(1)).tolist()
FIRST = 40
ENGINES = ["hf_engine", "eager_engine", pytest.param("vllm_engine", marks=pytest.mark.engine)]
ROPE_BASE = 10_000.0  # of the tiny models, whose configurations name none
ANSWERS = {"nothing": lambda x: None, "itself": lambda x: x, "a copy": lambda x: x.clone().contiguous()}


@pytest.fixture(scope="module")
def eager_engine(tiny_params):
    """The tiny model in transformers, float32, eager."""
    return start("hf", resolve(tiny_params.model), "float32", "eager", max_tokens=96)


@pytest.fixture
def engine(request):
    """One of the engines, by the name of its fixture."""
    return request.getfixturevalue(request.param)


def on(engines):
    return pytest.mark.parametrize("engine", engines, indirect=True)


def turned(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The rotary embedding of rows at positions `first`, ..., as complex multiplication in float64."""
    tokens, pairs = x.shape[-2], x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = torch.arange(first, first + tokens, dtype=torch.float64)[:, None] * frequencies
    x = x.double().cpu()
    pair = torch.complex(x[..., :pairs], x[..., pairs:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pair.real, pair.imag], dim=-1)


def seen(engine, placement: str) -> dict[tuple[int, str], torch.Tensor]:
    """What a tap that changes nothing is shown."""
    shown = {}

    def tap(layer, part, x):
        assert (layer, part) not in shown
        shown[layer, part] = x.clone()

    engine.score(IDS, FIRST, tap, placement)
    return shown


def perturbation(layer: int, part: str, like: torch.Tensor) -> torch.Tensor:
    """Fixed noise for a layer's K or V, float64."""
    source = torch.Generator().manual_seed(10 * layer + "kv".index(part))
    return 0.3 * torch.randn(like.shape, generator=source, dtype=torch.float64)


def perturbed(engine, placement: str) -> torch.Tensor:
    """Logits with noise on every K and V; after the rotary embedding that of K is rotated with it."""

    def tap(layer, part, x):
        if part == "q":
            return None
        delta = perturbation(layer, part, x)
        delta = turned(delta) if (part, placement) == ("k", "post_rope") else delta
        return (x.double() + delta.to(x.device)).to(x.dtype)

    return engine.score(IDS, FIRST, tap, placement)


@on(ENGINES)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_tap_that_changes_nothing_leaves_every_bit(engine, answer):
    plain = engine.score(IDS, FIRST)
    tapped = engine.score(IDS, FIRST, lambda layer, part, x: ANSWERS[answer](x), "post_rope")
    assert torch.equal(tapped, plain)
    assert torch.equal(engine.score(IDS, FIRST), plain)


@pytest.mark.parametrize("kind", sorted(tiny.CLASSES))
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_does_one_on_every_architecture_and_in_every_precision(tmp_path, kind, attention, dtype):
    folder = tiny.write_model(tmp_path / kind, kind)
    engine = start("hf", resolve(Model(path=str(folder), revision=None, n_layers=3)), dtype, attention, max_tokens=96)
    dtypes = set()

    def tap(layer, part, x):
        dtypes.add(str(x.dtype))
        return x.float().contiguous()

    assert torch.equal(engine.score(IDS, FIRST, tap, "post_rope"), engine.score(IDS, FIRST))
    assert dtypes == {f"torch.{dtype}"}


@on(ENGINES)
def test_k_after_the_rotary_embedding_is_k_before_it_rotated(engine):
    before, after = seen(engine, "pre_rope"), seen(engine, "post_rope")
    info = engine.info
    assert set(after) == {(layer, part) for layer in range(info.n_layers) for part in "kv"}
    for (layer, part), x in after.items():
        assert x.shape == (info.n_kv_heads, len(IDS), info.head_dim)
        want = before[layer, part].cpu()
        if part == "v":
            assert torch.equal(x.cpu(), want)
            continue
        torch.testing.assert_close(x.double().cpu(), turned(want), atol=2e-5, rtol=1e-5)
        assert (x.cpu() - want)[:, 1:].abs().max() > 0.1


@pytest.mark.parametrize("kind", sorted(tiny.CLASSES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_knows_its_k_after_the_rotary_embedding_without_a_second_pass(tmp_path, kind, dtype, monkeypatch):
    folder = tiny.write_model(tmp_path / kind, kind)
    engine = start("hf", resolve(Model(path=str(folder), revision=None, n_layers=3)), dtype, max_tokens=96)
    run, passed = WindowRun(engine, IDS, FIRST, 0), CleanCapture(FIRST)
    engine.score(IDS, FIRST, passed, "post_rope")
    monkeypatch.setattr(engine, "score", None)
    known = run.clean_at("post_rope").kept
    assert known.keys() == passed.kept.keys()
    assert all(torch.equal(known[place], x) for place, x in passed.kept.items())


@on(ENGINES)
def test_what_is_shown_is_shown_layer_by_layer(engine):
    order = []
    engine.score(IDS, FIRST, lambda layer, part, x: order.append((layer, part)), "post_rope")
    assert order == [(layer, part) for layer in range(engine.info.n_layers) for part in "kv"]


@on(ENGINES)
def test_an_error_of_k_costs_the_same_on_both_sides_when_it_is_rotated_with_k(engine):
    plain, before, after = engine.score(IDS, FIRST), perturbed(engine, "pre_rope"), perturbed(engine, "post_rope")
    assert (before - plain).abs().max() > 0.1
    torch.testing.assert_close(after, before, atol=2e-4, rtol=1e-4)


@on(ENGINES)
@pytest.mark.parametrize("part", "kv")
def test_attention_uses_what_the_tap_returns(engine, part):
    """Layers above see it, the layer itself and those below it are shown what they would have been."""
    clean, changed = seen(engine, "post_rope"), {}

    def tap(layer, own, x):
        changed[layer, own] = x.clone()
        return x * 0.5 if (layer, own) == (1, part) else None

    plain = engine.score(IDS, FIRST)
    assert (engine.score(IDS, FIRST, tap, "post_rope") - plain).abs().max() > 1e-2
    for (layer, own), x in clean.items():
        assert torch.equal(x, changed[layer, own]) == (layer <= 1)
    assert torch.equal(engine.score(IDS, FIRST), plain)


@on(["hf_engine", "eager_engine"])
def test_a_tap_that_fails_is_gone_afterwards(engine):
    def broken(layer, part, x):
        if layer == 1:
            raise RuntimeError("planted")

    plain = engine.score(IDS, FIRST)
    with pytest.raises(RuntimeError, match="planted"):
        engine.score(IDS, FIRST, broken, "post_rope")
    assert torch.equal(engine.score(IDS, FIRST), plain)


@pytest.mark.engine
def test_both_engines_show_the_same_and_take_the_same(hf_engine, vllm_engine):
    ours, theirs = seen(hf_engine, "post_rope"), seen(vllm_engine, "post_rope")
    assert set(ours) == set(theirs)
    for key, x in ours.items():
        torch.testing.assert_close(x, theirs[key].cpu(), atol=1e-4, rtol=1e-4)
    a, b = perturbed(hf_engine, "post_rope"), perturbed(vllm_engine, "post_rope")
    torch.testing.assert_close(a, b.cpu(), atol=2e-4, rtol=1e-4)


@on(ENGINES)
@pytest.mark.parametrize("tap", [None, lambda layer, part, x: None], ids=["untapped", "tapped"])
def test_an_unknown_placement_is_refused(engine, tap):
    with refused(UnknownName, None, "placement 'postrope'", "did you mean 'post_rope'"):
        engine.score(IDS, FIRST, tap, "postrope")
