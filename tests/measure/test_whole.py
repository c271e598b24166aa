"""The rivals that see all layers, on a real engine: fitted in one pass, measured, witnessed, filed, and refused."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch

from kvlab.cache.files.calibration import load_calibration, write_calibration
from kvlab.calibration.calibrate import calibrate, looked_at
from kvlab.calibration.joint import JointTap, outputs
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.calibration.needs import needed_files
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import CalibrationMismatch, CapabilityError, ParamsError, StreamError, WitnessDisagrees
from kvlab.measure.cache_codecs import coder_of
from kvlab.measure.coding import CleanCapture
from kvlab.measure.quick_run import NamedCodec, score
from kvlab.measure.scoring import cell_of_all_layers
from kvlab.witness.plain import PlainModel
from refusals import refused

CONTEXT = 64
ENDS = {"sink": 2, "recent": 6}
NAMES = ("kvtc-paper", "aquakv-paper")
RECIPES = {name: named_recipe(name, 2, **ENDS) for name in (*NAMES, "oscar-paper")}


@pytest.fixture(scope="module")
def calibrated(hf_engine, calib_windows):
    windows = calib_windows.calib[:, :CONTEXT].tolist()
    recipes = [*RECIPES.values(), *(named_recipe("aquakv-paper", bits, **ENDS) for bits in (1, 3))]
    return calibrate(hf_engine, windows, recipes, corpus_hash=calib_windows.corpus_hash, sample=4)


def begun(hf_engine, calibrated, recipe, ids, protocol="snapshot", **changes):
    """A coder that was told of a window's clean cache."""
    clean = CleanCapture(CONTEXT)
    hf_engine.score(ids, CONTEXT, clean)
    cell = cell_of_all_layers("whole", hf_engine, protocol, recipe, **changes)
    coder = coder_of(cell, calibrated)
    coder.begin(clean, ids[:CONTEXT], 0)
    return coder, clean


def test_they_are_measured_and_witnessed_and_more_bits_cost_less(hf_engine, calibrated, calib_windows):
    subjects = [
        NamedCodec(f"{name} {bits}", named_recipe(name, bits, **ENDS), calibrated) for name in NAMES for bits in (1, 3)
    ]
    subjects.append(NamedCodec("oscar-paper", RECIPES["oscar-paper"], calibrated))
    windows = np.asarray(calib_windows.test[:2])
    plain = cache(partial(PlainModel, hf_engine.info.path))
    found = score(hf_engine, windows, CONTEXT, subjects, plain)
    for coarse, fine in (found[:2], found[2:4]):
        assert coarse.tokens["kl"].mean() > fine.tokens["kl"].mean()
        assert coarse.cost.coding.bits_per_value < fine.cost.coding.bits_per_value
        assert coarse.witnessed and coarse.cost.coding.fires == coarse.cost.coding.expected_fires
    assert found[4].witnessed


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_the_file(hf_engine, calibrated, calib_windows, name):
    ids = calib_windows.test[0].tolist()
    coder, clean = begun(hf_engine, calibrated, RECIPES[name], ids)
    again = calibrated.whole_of(RECIPES[name]).encode(RECIPES[name], clean.kept, ids[:CONTEXT])
    assert again == coder.stored and coder.tally.coded_bytes == len(again)
    for at, x in coder.decoded(coder.stored, ids[:CONTEXT]).items():
        assert torch.equal(x, coder._decoded[at])
        assert torch.equal(x[:, :2], clean.kept[at][:, :2].half().float())


def test_a_witness_sees_another_file(hf_engine, calibrated, calib_windows, monkeypatch):
    """A coder that decodes what it did not store is found out."""
    from kvlab.measure.cache_codecs import WholeCoder

    whole = WholeCoder.decoded
    monkeypatch.setattr(WholeCoder, "decoded", lambda *given: {at: 1.01 * x for at, x in whole(*given).items()})
    subject = NamedCodec("kvtc", RECIPES["kvtc-paper"], calibrated)
    plain = cache(partial(PlainModel, hf_engine.info.path))
    with refused(WitnessDisagrees, "witness.other-codec"):
        score(hf_engine, np.asarray(calib_windows.test[:1]), CONTEXT, [subject], plain)


@pytest.mark.parametrize("name", RECIPES)
def test_a_calibration_file_codes_as_what_it_was_made_of(tmp_path, hf_engine, calibrated, calib_windows, name):
    recipe, info, ids = RECIPES[name], hf_engine.info, calib_windows.test[0].tolist()
    for decoder in (False, True):
        path = write_calibration(tmp_path / "a.kv", recipe, calibrated, info, decoder=decoder)
        again = load_calibration(path, info)
        if name == "oscar-paper":
            assert all(torch.equal(again.outputs[n], calibrated.outputs[n]) for n in range(info.n_layers))
            continue
        coder, _ = begun(hf_engine, calibrated, recipe, ids)
        reader, _ = begun(hf_engine, again, recipe, ids)
        assert reader.stored == coder.stored
    if name in NAMES:
        other = named_recipe(name, 2, **(ENDS | {"sink": 1}))
        with refused(StreamError, "stream.other-identity", "recipe_id"):
            list(again.whole_of(other).decode(other, coder.stored, ids[:CONTEXT]))
        with refused(CapabilityError, "capability.all-layers"):
            write_calibration(tmp_path / "b.kv", recipe, calibrated, info, layers=[1])


def test_what_was_not_fitted_or_cannot_be_coded_is_refused(tmp_path, hf_engine, calibrated, calib_windows):
    archive, ids = named_recipe("archive", 2), calib_windows.test[0].tolist()
    with refused(CalibrationMismatch, "calibration.not-fitted", "archive"):
        calibrated.whole_of(archive)
    with refused(CapabilityError, "capability.snapshot-only", "'kvtc'", "snapshot"):
        begun(hf_engine, calibrated, RECIPES["kvtc-paper"], ids, protocol="in_forward")
    with refused(CapabilityError, "capability.all-layers", "'aquakv'"):
        begun(hf_engine, calibrated, RECIPES["aquakv-paper"], ids, layers=(1, 2))
    other = named_recipe("aquakv-paper", 4)
    with refused(CalibrationMismatch, "calibration.other-bits", "aquakv", other.recipe_id):
        begun(hf_engine, calibrated, other, ids)
    for recipe in RECIPES.values():
        with refused(CapabilityError, "capability.one-file"):
            needed_files(recipe)
    with refused(ParamsError, None, "settings: ", "bits 1.4", "multiples of 0.5 to 4"):
        named_recipe("aquakv-paper", 1.4)


def test_only_what_recipes_read_is_looked_at():
    assert looked_at([RECIPES["kvtc-paper"]]) == ["joint"] and looked_at([RECIPES["aquakv-paper"]]) == ["rows"]
    assert looked_at([RECIPES["oscar-paper"]]) == ["outputs"] and looked_at([named_recipe("klt", 2)]) == []


def test_outputs_are_those_of_the_model_s_attention(hf_engine, calib_windows):
    ids, seen, given = calib_windows.test[0].tolist()[:CONTEXT], {}, {}
    attention = hf_engine.model.model.layers[1].self_attn
    hook = attention.o_proj.register_forward_pre_hook(lambda _, inputs: given.update(x=inputs[0][0].detach()))
    hf_engine.score(ids, CONTEXT - 2, lambda layer, part, x: seen.update({part: x.clone()}) if layer == 1 else None)
    hook.remove()
    angles = ErrorMetrics(hf_engine.info, CONTEXT).angles
    found = (
        outputs(seen["q"], seen["k"], seen["v"], angles[0], hf_engine.info.score_scale, None)
        .flatten(0, 1)
        .transpose(0, 1)
        .flatten(1)
    )
    torch.testing.assert_close(found[: len(given["x"])], given["x"], rtol=1e-4, atol=1e-5)


def test_moments_of_all_layers_are_those_of_all_rows(hf_engine):
    info, make = hf_engine.info, torch.Generator().manual_seed(0)
    tap, kept = JointTap(info, 20), {"k": [], "v": []}
    for window in range(3):
        for stream in ("k", "v"):
            layers = [3 + torch.randn(info.n_kv_heads, 20, info.head_dim, generator=make) for _ in range(info.n_layers)]
            kept[stream].append(torch.cat([x[:, 4:].transpose(0, 1).flatten(1) for x in layers], dim=1))
            for layer, x in enumerate(layers):
                tap.see(window, layer, stream, x)
    for stream, rows in kept.items():
        rows = torch.cat(rows)
        torch.testing.assert_close(tap.mean[stream], rows.mean(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(tap.covariance(stream), torch.cov(rows.mT), rtol=1e-3, atol=1e-3)


def test_a_model_too_wide_for_moments_of_all_layers_is_refused(hf_engine, monkeypatch):
    monkeypatch.setattr("kvlab.calibration.joint.MOST_WIDTH", 7)
    with refused(CapabilityError, None, "at most 7"):
        JointTap(hf_engine.info, 20)
