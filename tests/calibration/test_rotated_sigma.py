"""Sigma_q of the queries behind their rotary embedding: of the tiny model, against its own captured queries."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from codec import making
from kvlab.calibration.capture import Captured
from kvlab.calibration.sigma import describe, load_whiteners, rotated_path
from kvlab.codec.published import INVERSE_TOLERANCE, SigmaQ, read_sigma, write_sigma
from kvlab.codec.whitening import fit
from kvlab.errors import StreamError
from kvlab.model import resolve

ROPE_BASE = 10_000.0  # of the tiny model, whose configuration names none


def turned(q: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of [..., tokens, head_dim] as complex multiplication in float64."""
    tokens, pairs = q.shape[-2], q.shape[-1] // 2
    angle = torch.arange(tokens)[:, None] * ROPE_BASE ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    pair = torch.complex(*q.double().split(pairs, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pair.real, pair.imag], dim=-1)


def sidecar(path) -> dict:
    return json.loads(path.with_suffix(".json").read_text())


def test_it_is_the_second_moment_of_the_queries_at_their_own_positions(tiny_params, tiny_calibration):
    path = rotated_path(tiny_calibration["sigma"])
    captured = Captured(tiny_calibration["capture"], resolve(tiny_params.model).model_hash)
    found, before = read_sigma(path), read_sigma(tiny_calibration["sigma"])
    assert sorted(found.sigma) == [0, 1, 2]
    for layer, sigma in found.sigma.items():
        q = turned(captured.layer(layer, "q"))  # windows, heads, tokens, head_dim
        for head in range(2):
            group = q[:, 2 * head : 2 * head + 2].reshape(-1, 32)
            torch.testing.assert_close(sigma[head].double(), group.mT @ group / len(group), atol=1e-4, rtol=1e-4)
        assert (sigma - before.sigma[layer]).abs().max() > 0.1
        # turning moves energy inside pairs of channels, never between them
        pairs = [
            moment.diagonal(dim1=1, dim2=2).unflatten(1, (2, 16)).sum(1) for moment in (sigma, before.sigma[layer])
        ]
        torch.testing.assert_close(*pairs, atol=1e-3, rtol=1e-4)


def test_whiteners_and_diagnostics_are_those_of_the_rotated_moment(tiny_params, tiny_calibration):
    path, ridge = rotated_path(tiny_calibration["sigma"]), tiny_params.calibration.ridge
    whiteners = load_whiteners(path, resolve(tiny_params.model).model_hash)
    sigma = load_file(path)["layer_1_sigma"].double()
    weight = whiteners[1].chol.double() @ whiteners[1].chol.double().mT
    torch.testing.assert_close(weight, sigma * (1 + ridge * torch.eye(32)), atol=1e-4, rtol=1e-4)
    row = next(row for row in sidecar(path)["diagnostics"] if (row["layer"], row["kv_head"]) == (1, 1))
    assert row["eig_max"] == pytest.approx(describe(sigma[1], ridge)["eig_max"], rel=1e-5)


def test_the_two_files_differ_in_what_is_rotated_only(tiny_calibration):
    path = rotated_path(tiny_calibration["sigma"])
    assert (path.name, path.parent) == ("hf-post_rope.safetensors", tiny_calibration["sigma"].parent)
    assert set(load_file(path)) == set(load_file(tiny_calibration["sigma"]))
    ours, theirs = sidecar(path), sidecar(tiny_calibration["sigma"])
    assert (ours.pop("placement"), theirs.pop("placement")) == ("post_rope", "pre_rope")
    assert ours.pop("diagnostics") != theirs.pop("diagnostics")
    assert ours == theirs


@given(exponents=st.lists(st.integers(-7, 7), min_size=16, max_size=16))
@settings(max_examples=20, deadline=None)
def test_whiteners_follow_a_rewriting_of_the_channels(tiny_calibration, exponents):
    """Q times powers of two, K over them, pair by pair: the same model, and the same whitened K bit for bit."""
    units = 2.0 ** torch.tensor(2 * exponents, dtype=torch.float64)
    for path in (tiny_calibration["sigma"], rotated_path(tiny_calibration["sigma"])):
        sigma = load_file(path)["layer_0_sigma"].double()
        whitener, rewritten = fit(sigma, 1e-3), fit(units[:, None] * sigma * units, 1e-3)
        assert torch.equal(rewritten.chol, whitener.chol * units[:, None].float())
        assert torch.equal(rewritten.inv_chol, whitener.inv_chol / units.float())


def test_channels_of_very_different_units_are_no_damaged_file(tmp_path):
    """Factor and inverse are held together in units of the channels."""
    units = 10.0 ** torch.linspace(-3, 3, 64, dtype=torch.float64)
    sigma = units[:, None] * making.second_moment(2, 64) * units
    whitener = fit(sigma, 1e-3)
    assert (whitener.chol @ whitener.inv_chol - torch.eye(64)).abs().max() > 10 * INVERSE_TOLERANCE
    write_sigma(tmp_path / "s.safetensors", SigmaQ({0: sigma}, {0: whitener}, {}), {})
    assert torch.equal(read_sigma(tmp_path / "s.safetensors").whiteners[0].chol, whitener.chol)


def test_an_inverse_of_another_factor_is_still_refused(tiny_calibration, tmp_path):
    sigma = load_file(tiny_calibration["sigma"])["layer_0_sigma"].double()
    wrong = fit(sigma, 1e-3)
    wrong.inv_chol[1, 7, 3] += 0.01 / wrong.chol[1, 7].norm() * wrong.chol[1, 3].norm()
    write_sigma(tmp_path / "s.safetensors", SigmaQ({0: sigma}, {0: wrong}, {}), {})
    with pytest.raises(StreamError, match="not its inverse"):
        read_sigma(tmp_path / "s.safetensors")
