"""The codec of whole caches in the pipeline: asked for, captured, fitted, read; refused where it is of another."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvlab.calibration import load as calibration
from kvlab.calibration.across import names
from kvlab.calibration.archive_file import archive_identity, write_archive
from kvlab.calibration.asked import read_asked, write_asked
from kvlab.calibration.calibrate import fitted
from kvlab.calibration.capture import Captured, capture, observe
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import CalibrationMismatch, CapabilityError, UnknownName
from kvlab.core.model import resolve
from kvlab.core.records import to_header
from kvlab.measure.cache_codecs import coder_of
from kvlab.measure.coding import CleanCapture
from kvlab.measure.subjects import Memo
from kvlab.text import corpus
from kvlab_pipeline.jobs import plan
from refusals import refused

RECIPE = named_recipe("archive", 2)


@pytest.fixture(scope="module")
def info(tiny_params):
    return resolve(tiny_params.model)


@pytest.fixture(scope="module")
def unasked(tiny_params, tiny_windows, tmp_path_factory):
    """A capture of which no codec of whole caches was asked for, and the file that says so."""
    folder = tmp_path_factory.mktemp("unasked")
    write_asked([], folder / "asked.json")
    capture(tiny_params, "hf", tiny_windows, folder / "capture.safetensors", folder / "asked.json")
    return folder


def test_what_is_asked_for_is_named_once_and_in_order(tmp_path):
    write_asked(["archive", "archive"], tmp_path / "asked.json")
    assert read_asked(tmp_path / "asked.json") == ("archive",)
    with refused(UnknownName, None, "archiv", "'archive'?"):
        write_asked(["archiv"], tmp_path / "asked.json")
    (tmp_path / "asked.json").write_text(json.dumps({"codecs": ["klt"]}))
    with refused(CalibrationMismatch, "calibration.codec-of-tensors", "'klt'"):
        read_asked(tmp_path / "asked.json")
    (tmp_path / "asked.json").write_text("[]")
    with refused(CalibrationMismatch, "calibration.other-file", "`kvlab step asked`"):
        read_asked(tmp_path / "asked.json")


def test_a_capture_in_a_file_fits_the_same_codec_as_in_memory(tiny_params, tiny_windows, info, hf_engine, tmp_path):
    windows = corpus.load(tiny_windows, info.model_hash)
    calib = windows.calib[:, : windows.context].tolist()
    observed = observe(hf_engine, calib, windows.context, windows.corpus_hash, 4, beside=("across",))
    save_file(observed.tensors, tmp_path / "capture.safetensors", to_header(observed.metadata))
    captured = Captured(tmp_path / "capture.safetensors", info.model_hash)
    fresh, filed = (fitted(one, info, [RECIPE]).archive for one in (observed, captured))
    assert fresh.digest == filed.digest and torch.equal(fresh.probes, filed.probes)
    assert captured.across.ids == [calib[i] for i in captured.sampled]


@pytest.mark.full
def test_the_pipelines_codec_is_the_one_that_is_fitted_in_one_go(tiny_params, tiny_calibration, tiny_fitted, info):
    ridge = tiny_params.calibration.ridge
    whole = fitted(Captured(tiny_calibration["capture"], info.model_hash), info, [RECIPE], ridge).archive
    filed = calibration.load(tiny_fitted, info.model_hash, info=info).archive
    assert torch.equal(filed.probes, whole.probes) and filed.tensors.keys() == whole.tensors.keys()
    torch.testing.assert_close(filed.fitted.rates, whole.fitted.rates, rtol=1e-3, atol=0)  # Sigma_q was rounded
    for place, one in filed.fitted.streams.items():
        off, large = (one.spectrum.int() - whole.fitted.streams[place].spectrum.int()).abs(), one.spectrum.amax() - 640
        assert off[one.spectrum > large].max() <= 1  # 64th of an octave, where there is more than rounding


def test_who_does_not_ask_pays_nothing_and_fits_the_rest_alike(unasked, tiny_calibration, info):
    captures = (unasked / "capture.safetensors", tiny_calibration["capture"])
    with safe_open(captures[0], "pt") as bare, safe_open(captures[1], "pt") as whole:
        assert set(whole.keys()) - set(bare.keys()) == names(info.n_layers)
        assert all(torch.equal(bare.get_tensor(name), whole.get_tensor(name)) for name in bare.keys())  # noqa: SIM118
    captured = Captured(unasked / "capture.safetensors", info.model_hash)
    assert captured.metadata["across"] is False and captured.across is None
    asked = Captured(tiny_calibration["capture"], info.model_hash)
    assert asked.metadata["across"] is True and len(asked.across) == info.n_layers


def test_without_moments_across_layers_nothing_is_fitted(unasked, tiny_params, tiny_calibration, tmp_path):
    found = unasked / "capture.safetensors", tiny_calibration["sigma"], tmp_path / "archive.safetensors"
    with refused(CapabilityError, "capability.not-captured"):
        write_archive(tiny_params, tiny_calibration["asked"], *found)
    assert not found[-1].exists()


def test_a_file_for_nobody_is_read_by_nobody(unasked, tiny_params, tiny_calibration, tiny_fitted, info, tmp_path):
    out = tmp_path / "archive.safetensors"
    write_archive(tiny_params, unasked / "asked.json", unasked / "capture.safetensors", tiny_calibration["sigma"], out)
    assert archive_identity(out) == archive_identity(tiny_calibration["archive"]) and out.stat().st_size < 1000
    empty = calibration.load(replace(tiny_fitted, archive=out), info.model_hash, info=info)
    assert empty.archive is None
    with refused(CalibrationMismatch, "calibration.not-fitted", "archive", "`kvlab step archive`"):
        coder_of(cells(tiny_params), empty)
    with refused(CalibrationMismatch, "calibration.not-fitted", "archive"):
        coder_of(cells(tiny_params), None)


def cells(params):
    """A cell of the ladder whose codec codes whole caches."""
    return next(cell for cell in plan.study_cells(params, "ladder", "hf") if cell.recipe == RECIPE)


def test_cells_of_equal_recipe_code_a_cache_once(tiny_params, tiny_windows, tiny_fitted, info, hf_engine):
    windows = corpus.load(tiny_windows, info.model_hash)
    ids, clean, memo = windows.test[0].tolist(), CleanCapture(windows.context), Memo()
    hf_engine.score(ids, windows.context, clean)
    calibrated = calibration.load(tiny_fitted, info.model_hash, info=info)
    coders = [coder_of(cells(tiny_params), calibrated, memo) for _ in range(2)]
    for coder in coders:
        coder.begin(clean, ids[: windows.context], 0)
    first, second = coders
    assert len(memo) == 1 and first.stored is second.stored and len(first.stored) == second.tally.coded_bytes
    assert first.tally == second.tally and first.tally.encode_seconds == second.tally.encode_seconds > 0


def test_a_codec_of_another_sigma_is_refused(tiny_params, tiny_calibration, tiny_fitted, info, tmp_path):
    from kvlab.calibration.sigma import fit_sigma

    sigma = tmp_path / "hf.safetensors"
    ridge = tiny_params.calibration.model_copy(update={"ridge": 0.1})
    fit_sigma(tiny_params.model_copy(update={"calibration": ridge}), tiny_calibration["capture"], sigma)
    other = calibration.FittedFiles(sigma, archive=tiny_fitted.archive)
    with refused(CalibrationMismatch, "calibration.other-fit", "sigma_hash"):
        calibration.load(other, info.model_hash, info=info)
    with refused(CalibrationMismatch, "calibration.unreadable", tmp_path / "none"):
        calibration.load(replace(tiny_fitted, archive=tmp_path / "none"), info.model_hash, info=info)


def test_the_file_is_put_to_its_origin(tiny_fitted):
    found = calibration.by_origin([tiny_fitted.sigma], archive=[tiny_fitted.archive])
    assert found["hf"].archive == tiny_fitted.archive and found["hf"].archive in found["hf"].paths
