"""Losses against what they stand for: the KL divergence that a small error of K or V really makes."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvlab.calibration import losses
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.core.errors import NonFinite
from refusals import refused

CACHED, SCORED, DRAWS, SIZE = 48, 16, 24, 3e-3


@pytest.fixture(scope="module")
def ids(calib_windows):
    return calib_windows.calib[0, : CACHED + SCORED].tolist()


@pytest.fixture(scope="module")
def found(hf_engine, ids):
    """Losses of one window, mean over many draws of its labels."""
    angles = ErrorMetrics(hf_engine.info, len(ids)).angles
    draws = [losses.of_window(hf_engine.model, hf_engine.info, ids, number, angles) for number in range(DRAWS)]
    return {name: torch.stack([draw[name] for draw in draws]).mean(0) for name in draws[0]}


def likelihoods(engine, ids, changed=None):
    """Log-probabilities of the scored tokens over a cache of which one tensor was changed."""
    tokens, cache = torch.tensor([ids]), DynamicCache()
    with torch.no_grad():
        engine.model(tokens[:, :CACHED], past_key_values=cache)
        if changed:
            layer, stream, error = changed
            held = cache.layers[layer]
            getattr(held, {"k": "keys", "v": "values"}[stream])[0, :, losses.SPARED :] += error
        return engine.model(tokens[:, CACHED:], past_key_values=cache).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize(("layer", "stream"), [(0, "v"), (1, "k"), (2, "v")])
def test_half_the_loss_times_the_square_is_the_divergence(hf_engine, ids, found, layer, stream):
    """Of an error of the same size in all channels of a head, which the rotary embedding only turns."""
    clean, source = likelihoods(hf_engine, ids), torch.Generator().manual_seed(0)
    tokens, heads, head_dim = CACHED - losses.SPARED, *found["layer_0_v_loss"].shape
    for head in range(heads):
        seen = []
        for _ in range(DRAWS):
            error = torch.zeros(heads, tokens, head_dim)
            error[head] = SIZE * torch.randn(tokens, head_dim, generator=source)
            other = likelihoods(hf_engine, ids, (layer, stream, error))
            seen.append((clean.exp() * (clean - other)).sum(-1).mean().item())
        told = 0.5 * SIZE**2 * tokens * found[f"layer_{layer}_{stream}_loss"][head].sum().item()
        assert torch.tensor(seen).mean().item() == pytest.approx(told, rel=0.3)


def test_every_layer_and_stream_has_one_and_they_repeat_themselves(hf_engine, ids, found):
    info = hf_engine.info
    angles = ErrorMetrics(info, len(ids)).angles
    assert set(found) == {f"layer_{layer}_{stream}_loss" for layer in range(info.n_layers) for stream in "kv"}
    twice = [losses.measured(hf_engine, [ids, ids[::-1]], angles) for _ in range(2)]
    for name, loss in twice[0].items():
        assert loss.shape == (info.n_kv_heads, info.head_dim) and loss.dtype == torch.float64 and (loss >= 0).all()
        assert torch.equal(loss, twice[1][name])


def test_the_model_is_left_as_it_was(hf_engine, ids):
    asked = [weight.requires_grad for weight in hf_engine.model.parameters()]
    losses.measured(hf_engine, [ids], ErrorMetrics(hf_engine.info, len(ids)).angles)
    assert [weight.requires_grad for weight in hf_engine.model.parameters()] == asked and any(asked)
    with pytest.raises(IndexError):
        losses.measured(hf_engine, [ids], [])
    assert [weight.requires_grad for weight in hf_engine.model.parameters()] == asked


def test_a_gradient_that_is_no_number_is_refused(hf_engine, ids, monkeypatch):
    broken = {"layer_0_k_loss": torch.full((2, 32), torch.nan)}
    monkeypatch.setattr(losses, "of_window", lambda *_: broken)
    with refused(NonFinite, "non-finite.gradient", "layer_0_k_loss", "float32"):
        losses.measured(hf_engine, [ids], None)
