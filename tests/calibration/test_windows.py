"""A calibration of layers that see a window of tokens alone, and turn K each in its own way."""

from __future__ import annotations

import pytest
import torch

import tiny
from kvlab.calibration.across import expected_attention
from kvlab.calibration.joint import outputs
from kvlab.calibration.losses import measured
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.codecs.archive.steps import LEAST, exponents
from kvlab.codecs.shared.metric import over_lags
from kvlab.core.model import resolve_folder
from kvlab.engines.hf.engine import HFEngine
from kvlab.engines.registry import start

pytestmark = pytest.mark.engine
CONTEXT, IDS = 48, list(range(7, 71))


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> HFEngine:
    """Two layers with a window of 24 and one without; scores are scaled as for another size of heads."""
    return start(
        "hf", resolve_folder(tiny.write_model(tmp_path_factory.mktemp("m"), "gemma3")), "float32", max_tokens=64
    )


@pytest.fixture(scope="module")
def seen(engine) -> dict:
    """Q, K and V by layer and part."""
    found = {}
    engine.score(IDS, CONTEXT, lambda layer, part, x: found.update({(layer, part): x.clone()}))
    return found


@pytest.fixture(scope="module")
def metrics(engine) -> ErrorMetrics:
    return ErrorMetrics(engine.info, len(IDS))


def test_outputs_are_those_of_the_models_attention(engine, seen, metrics):
    given = {}
    layers = [layer.self_attn for layer in engine.model.model.layers]
    hooks = [
        one.o_proj.register_forward_pre_hook(lambda _, inputs, layer=layer: given.update({layer: inputs[0][0]}))
        for layer, one in enumerate(layers)
    ]
    engine.score(IDS, CONTEXT)
    for hook in hooks:
        hook.remove()
    for layer, window in enumerate(engine.info.windows):
        q, k, v = (seen[layer, part] for part in "qkv")
        found = outputs(q, k, v, metrics.angles[layer], engine.info.score_scale, window).flatten(0, 1)
        torch.testing.assert_close(found.transpose(0, 1).flatten(1), given[layer], rtol=1e-4, atol=1e-5)


def test_expected_attention_is_the_models_and_knows_what_nobody_will_see(engine, seen, metrics):
    engine.model.set_attn_implementation("eager")
    weights = engine.model(torch.tensor([IDS[: CONTEXT + 1]]), output_attentions=True).attentions
    engine.model.set_attn_implementation("sdpa")
    for layer, window in enumerate(engine.info.windows):
        q, k = seen[layer, "q"][:, CONTEXT : CONTEXT + 1], seen[layer, "k"][:, :CONTEXT]
        found = expected_attention(q, k, metrics.angles[layer], engine.info.score_scale, window)
        gone = CONTEXT + 1 - window if window else 0
        theirs = weights[layer][0, :, -1, :CONTEXT]
        due = (theirs / theirs.sum(-1, keepdim=True)).square().sum(0)
        assert found[:gone].isnan().all() and not due[:gone].any()
        torch.testing.assert_close(found[gone:], due[gone:], rtol=1e-4, atol=1e-6)
        assert (exponents(found)[:gone] == LEAST).all()
        assert torch.equal(exponents(found)[gone:], exponents(found[gone:]))


def test_errors_of_keys_are_weighed_by_the_lags_at_which_they_are_seen(engine, metrics):
    sigma = torch.eye(32).double()[None] * torch.arange(1.0, 33).double()
    for layer, window in enumerate(engine.info.windows):
        cos, sin = metrics.angles[layer]
        due = over_lags(sigma, cos[: window or len(IDS)], sin[: window or len(IDS)])
        assert torch.equal(metrics.k(layer, sigma), due)
    assert not torch.equal(metrics.k(0, sigma), metrics.k(2, sigma))
    assert torch.equal(metrics.k(0, sigma), metrics.k(1, sigma))


def test_what_no_scored_token_sees_costs_nothing(engine, metrics):
    """Of 64 tokens the last 16 are scored: 48 are cached, of which a window of 24 shows 23 at most, and 8 to the last.

    So a layer with a window has its losses from fewer tokens; with a window of 2 it has next to none.
    """
    found = measured(engine, [IDS], metrics.angles)
    assert all(bool((loss > 0).all()) for loss in found.values())
    config = engine.model.config
    config.sliding_window = 2
    try:
        narrow = measured(engine, [IDS], metrics.angles)
    finally:
        config.sliding_window = tiny.WINDOW
    for stream in "kv":
        name = f"layer_0_{stream}_loss"
        assert narrow[name].sum() < found[name].sum()
