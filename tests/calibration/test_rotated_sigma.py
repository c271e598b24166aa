"""Sigma_q of the queries after their rotary embedding: of the tiny model, against its own captured queries."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from codec import making
from kvlab.calibration.sigma import describe, load_whiteners, rotated_path, round_trip_errors
from kvlab.codecs.shared.whitening import Whitener, fit
from kvlab.codecs.stream.published import INVERSE_TOLERANCE, SigmaQ, read_sigma, write_sigma
from kvlab.core.errors import StreamError
from kvlab.core.model import resolve
from kvlab.core.records import file_hash
from refusals import refused
from tiers import examples

ROPE_BASE = 10_000.0  # of the tiny model, whose configuration names none


def turned(q: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of [..., tokens, head_dim] as complex multiplication in float64."""
    tokens, pairs = q.shape[-2], q.shape[-1] // 2
    angle = torch.arange(tokens)[:, None] * ROPE_BASE ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    pair = torch.complex(*q.double().split(pairs, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pair.real, pair.imag], dim=-1)


def sidecar(path) -> dict:
    return json.loads(path.with_suffix(".json").read_text())


def test_it_is_the_second_moment_of_the_queries_at_their_own_positions(tiny_calibration, everything):
    path = rotated_path(tiny_calibration["sigma"])
    found, before = read_sigma(path), read_sigma(tiny_calibration["sigma"])
    assert sorted(found.sigma) == [0, 1, 2]
    for layer, sigma in found.sigma.items():
        q = turned(everything[f"layer_{layer}_q"])  # windows, heads, tokens, head_dim
        for head in range(2):
            group = q[:, 2 * head : 2 * head + 2].reshape(-1, 32)
            torch.testing.assert_close(sigma[head].double(), group.mT @ group / len(group), atol=1e-4, rtol=1e-4)
        assert (sigma - before.sigma[layer]).abs().max() > 0.1
        # turning moves energy inside pairs of channels, never between them
        pairs = [
            moment.diagonal(dim1=1, dim2=2).unflatten(1, (2, 16)).sum(1) for moment in (sigma, before.sigma[layer])
        ]
        torch.testing.assert_close(*pairs, atol=1e-3, rtol=1e-4)


def test_traces_of_single_windows_have_the_pooled_trace_as_their_mean(tiny_calibration, everything):
    sigma, by_place = read_sigma(tiny_calibration["sigma"]).sigma, {}
    for row in sidecar(tiny_calibration["sigma"])["diagnostics"]:
        by_place[row["layer"], row["kv_head"]] = row["window_traces"]
        assert sum(row["window_traces"]) / 6 == pytest.approx(row["sigma_trace"], rel=1e-12)
        assert row["sigma_trace"] == pytest.approx(float(sigma[row["layer"]][row["kv_head"]].trace()), rel=1e-6)
    group = everything["layer_2_q"][4, 2:4].double()  # the query heads that KV head 1 serves
    assert by_place[2, 1][4] == pytest.approx(float(group.square().sum(-1).mean()), rel=1e-12)
    assert all(len(traces) == 6 for traces in by_place.values())


def test_the_round_trip_error_is_that_of_float32_and_sees_a_wrong_inverse(tiny_params, tiny_calibration):
    for path in (tiny_calibration["sigma"], rotated_path(tiny_calibration["sigma"])):
        assert all(0 < row["round_trip_error"] < 1e-4 for row in sidecar(path)["diagnostics"])
    k = torch.randn(2, 2, 50, 8, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([1.0, 1.25])[:, None, None]  # the second head's inverse is a quarter too large
    eye = torch.eye(8).expand(2, 8, 8).contiguous()
    torch.testing.assert_close(round_trip_errors(k, Whitener(eye, eye * scale)), torch.tensor([0.0, 0.25]).double())


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
    ours_by_head, theirs_by_head = ours.pop("diagnostics"), theirs.pop("diagnostics")
    assert ours_by_head != theirs_by_head
    for mine, other in zip(ours_by_head, theirs_by_head, strict=True):  # a rotation moves no energy
        assert mine["window_traces"] == other["window_traces"]
    assert ours.pop("file_hash") == file_hash(path)
    assert ours.pop("sigma_hash") == theirs.pop("file_hash") == file_hash(tiny_calibration["sigma"])
    assert ours == theirs


@given(exponents=st.lists(st.integers(-7, 7), min_size=16, max_size=16))
@examples(20)
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
    with refused(StreamError, "stream.not-inverse"):
        read_sigma(tmp_path / "s.safetensors")
