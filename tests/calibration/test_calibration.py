"""Sigma_q and codebooks: the formulas, the published formats, and whose they are."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlab.calibration import load as calibration
from kvlab.calibration.capture import Captured, capture
from kvlab.calibration.codebooks import fit_codebooks
from kvlab.calibration.sigma import describe, second_moment
from kvlab.errors import CalibrationMismatch, NonFinite
from kvlab.model import resolve
from kvlab.paramfile import overlay
from kvlab.params import Params, studied_recipe


def test_second_moment_is_the_mean_over_the_group_and_all_tokens():
    q = torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(0))
    sigma = second_moment(q, n_kv_heads=2)
    for head in range(2):
        rows = [q[w, j, t].double() for w in range(2) for j in (2 * head, 2 * head + 1) for t in range(5)]
        expected = sum(torch.outer(row, row) for row in rows) / len(rows)
        torch.testing.assert_close(sigma[head], expected)


def test_diagnostics_of_a_known_matrix():
    facts = describe(torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64)), ridge=0.0)
    assert facts["condition"] == pytest.approx(4)
    assert facts["whitening_gain_db"] == pytest.approx(10 * np.log10(2.5 / 2))
    assert facts["off_diag_max_abs"] == 0


def test_the_published_format_is_kept(tiny_calibration):
    tensors = load_file(tiny_calibration["sigma"])
    assert set(tensors) == {f"layer_{layer}_{kind}" for layer in range(3) for kind in ("chol", "inv_chol", "sigma")}
    for layer in range(3):
        chol, inverse = tensors[f"layer_{layer}_chol"], tensors[f"layer_{layer}_inv_chol"]
        assert chol.shape == (2, 32, 32) and chol.dtype == torch.float32
        torch.testing.assert_close(chol @ inverse, torch.eye(32).expand(2, 32, 32), atol=2e-5, rtol=0)
        assert torch.equal(chol, chol.tril())
    sidecar = json.loads(tiny_calibration["sigma"].with_suffix(".json").read_text())
    assert sidecar["n_passages_used"] == 6 and sidecar["n_tokens_pooled"] == 6 * 96
    assert len(sidecar["diagnostics"]) == 6


def test_tables_are_files_of_ascending_floats(tiny_calibration, tiny_params):
    folder = tiny_calibration["codebooks"].with_suffix("")
    names = {path.name for path in folder.iterdir()}
    assert names == {"K_vr1.f32", "K_vr0.95.f32", "V_vr1.f32", "V_vr0.95.f32"}
    table = np.fromfile(folder / "K_vr1.f32", "<f4")
    assert len(table) == 2**tiny_params.bits and (np.diff(table) > 0).all()


def test_a_fitted_table_is_never_worse_on_its_own_pool(tiny_calibration):
    for table in json.loads(tiny_calibration["codebooks"].read_text())["tables"]:
        assert table["mse_fitted"] <= table["mse_gaussian"] * (1 + 1e-6)
        assert table["n_samples"] > 1000


def test_calibrating_again_gives_the_same_bytes(tiny_params, tiny_calibration, tiny_windows, tmp_path):
    capture(tiny_params, "hf", tiny_windows, tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == tiny_calibration["capture"].read_bytes()
    fit_codebooks(tiny_params, tmp_path / "c.safetensors", tiny_calibration["sigma"], tmp_path / "cb.json")
    assert (tmp_path / "cb.json").read_bytes() == tiny_calibration["codebooks"].read_bytes()


def test_calibration_of_another_model_is_refused(tiny_calibration):
    with pytest.raises(CalibrationMismatch, match="this model is another"):
        calibration.load(tiny_calibration["sigma"], tiny_calibration["codebooks"], "another")
    with pytest.raises(CalibrationMismatch, match="captured from model"):
        Captured(tiny_calibration["capture"], "another")


def test_calibration_on_other_windows_than_are_scored_is_refused(tiny_params, tiny_calibration):
    paths = tiny_calibration["sigma"], tiny_calibration["codebooks"]
    with pytest.raises(CalibrationMismatch, match="scored are windows another"):
        calibration.load(*paths, resolve(tiny_params.model).model_hash, "another")


def test_a_table_of_another_recipe_is_refused(tiny_params, tiny_calibration):
    model_hash = resolve(tiny_params.model).model_hash
    calibrated = calibration.load(tiny_calibration["sigma"], tiny_calibration["codebooks"], model_hash)
    assert calibrated.stream(studied_recipe(tiny_params).k).centroids is not None
    other = Params.complete(overlay(tiny_params.model_dump(mode="json"), {"bits": 4}))
    with pytest.raises(CalibrationMismatch, match=r"no codebook was fitted.*bits 4"):
        calibrated.stream(studied_recipe(other).k)


def test_nan_in_a_capture_is_refused(tiny_params, tiny_windows, tmp_path, monkeypatch):
    from kvlab.calibration import capture as module

    class Broken:
        device = "cpu"

        def score(self, ids, first, tap):
            tap(0, "k", torch.full((2, 96, 32), float("nan")))

    monkeypatch.setattr(module, "start", lambda *a, **k: Broken())
    with pytest.raises(NonFinite, match="layer_0_k"):
        capture(tiny_params, "hf", tiny_windows, tmp_path / "c.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_capture_file_says_what_to_run(tmp_path):
    (tmp_path / "c.safetensors").write_bytes(b"short")
    with pytest.raises(CalibrationMismatch, match="run `kvlab capture`"):
        Captured(tmp_path / "c.safetensors", "x")
    save_file({"a": torch.zeros(1)}, tmp_path / "d.safetensors")
    with pytest.raises(CalibrationMismatch, match="run `kvlab capture`"):
        Captured(tmp_path / "d.safetensors", "x")
