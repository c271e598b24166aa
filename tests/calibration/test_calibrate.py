"""A calibration in one go and in memory, what a capture keeps, and what it does not grow with."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kvlab import recipe
from kvlab.calibration import load as calibration
from kvlab.calibration.calibrate import calibrate, fitted
from kvlab.calibration.capture import Captured, capture, observe, sample_of
from kvlab.calibration.components import ridged_sigma
from kvlab.calibration.metrics import ErrorMetrics, rotary_angles
from kvlab.calibration.moments import names
from kvlab.calibration.sigma import second_moment
from kvlab.codecs.block.studied import studied_recipe
from kvlab.codecs.klt import KltStream
from kvlab.codecs.shared.grouping import joined
from kvlab.codecs.shared.metric import ridged
from kvlab.codecs.shared.turning import RUN, over_positions
from kvlab.core.errors import NonFinite, UserError
from kvlab.core.model import resolve
from kvlab.core.recipe import IDENTITY, Recipe
from kvlab.core.records import from_header
from refusals import refused, refused_in_one_line

pytestmark = pytest.mark.engine


def test_a_capture_holds_the_moments_of_all_and_a_sample(tiny_params, tiny_calibration, everything):
    captured = Captured(tiny_calibration["capture"], resolve(tiny_params.model).model_hash)
    assert captured.sampled == tuple(range(6)) and captured.context == 64 and captured.dtype == "float32"
    for layer in range(3):
        q = everything[f"layer_{layer}_q"]
        expected = second_moment(q, 2)
        torch.testing.assert_close(captured.queries(layer).second_moment("pre_rope"), expected, rtol=1e-12, atol=1e-12)
        for stream in "kv":
            contexts = everything[f"layer_{layer}_{stream}"]
            assert torch.equal(captured.layer(layer, stream), contexts.bfloat16().float())
            assert torch.equal(captured.window(layer, stream, 4), contexts[4].bfloat16())
            rows = joined(contexts[:, :, 1:].transpose(0, 1).flatten(1, 2).double(), 1)
            torch.testing.assert_close(captured.first(layer, stream), contexts[:, :, 0].double().mean(0))
            count, mean, scatter = captured.moments(layer, stream).pooled()
            torch.testing.assert_close(mean, rows.mean(1), rtol=1e-12, atol=1e-12)
            covariance = torch.stack([torch.cov(r.mT) for r in rows])
            torch.testing.assert_close(scatter / (count - 1), covariance, rtol=1e-11, atol=1e-12)


def test_what_is_folded_meanwhile_and_after_a_window_is_the_same(hf_engine, calib_windows, monkeypatch):
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        seen = observe(hf_engine, calib_windows.calib[:3, :64].tolist(), 64, "text", sample=2, beside=["across"])
        found.append(seen.tensors)
    assert found[0].keys() == found[1].keys() and all(torch.equal(x, found[1][name]) for name, x in found[0].items())


def test_both_engines_leave_the_same(tiny_params, tiny_calibration, vllm_engine, calib_windows):
    """vLLM's own tensors, folded up where they appear: float32 rounding apart, what transformers left."""
    hf = Captured(tiny_calibration["capture"], vllm_engine.info.model_hash)
    found = observe(vllm_engine, calib_windows.calib[:, :64].tolist(), 64, calib_windows.corpus_hash, sample=16)
    assert (found.metadata["engine"], found.sampled, found.extent) == ("vllm", hf.sampled, hf.extent)
    for layer in range(3):
        for placement in ("pre_rope", "post_rope"):
            ours, theirs = (one.queries(layer).second_moment(placement) for one in (found, hf))
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        for stream in "kv":
            for ours, theirs in zip(
                found.moments(layer, stream).pooled()[1:], hf.moments(layer, stream).pooled()[1:], strict=True
            ):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
            torch.testing.assert_close(found.layer(layer, stream), hf.layer(layer, stream), rtol=2e-2, atol=1e-2)


def test_windows_add_a_number_each_and_nothing_else(tiny_params, hf_engine, calib_windows):
    """The moments of six windows are as large as those of three; only the sample is kept."""
    ids = calib_windows.calib[:, :64].tolist()
    few, many = (observe(hf_engine, some, 64, calib_windows.corpus_hash, sample=2) for some in (ids[:3], ids))
    assert few.sampled == (0, 1) and many.sampled == (0, 3)
    grown = {name for name in many.tensors if many.tensors[name].shape != few.tensors[name].shape}
    assert grown == {f"layer_{layer}_q_traces" for layer in range(3)}
    assert many.tensors["layer_0_q_traces"].shape == (6, 2)
    assert many.metadata["sample_bytes"] == 2 * 3 * 2 * (2 * 64 * 32) * 2  # windows, layers, K and V, values, bytes
    places = {f"layer_{layer}_{stream}" for layer in range(3) for stream in "kv"}
    assert set(many.tensors) == names(3) | places | {f"{place}_loss" for place in places}


@pytest.mark.parametrize(
    ("windows", "most", "kept"), [(6, 16, range(6)), (160, 4, (0, 40, 80, 120)), (7, 3, (0, 2, 4))]
)
def test_a_sample_is_spread_evenly(windows, most, kept):
    assert sample_of(windows, most) == tuple(kept)


def test_the_files_of_a_calibration_name_the_sample(tiny_calibration):
    for name in ("sigma", "rotated", "components"):
        facts = json.loads(tiny_calibration[name].with_suffix(".json").read_text())
        assert (facts["sample"], facts["sample_dtype"]) == ([0, 1, 2, 3, 4, 5], "bfloat16")
        assert facts["sample_bytes"] == 6 * 3 * 2 * (2 * 64 * 32) * 2
    assert json.loads(tiny_calibration["codebooks"].read_text())["sample_bytes"] == facts["sample_bytes"]
    with safe_open(tiny_calibration["capture"], "pt") as file:
        assert from_header(file.metadata())["sample_bytes"] == facts["sample_bytes"]


def determined(components) -> list[torch.Tensor]:
    """What rounding cannot turn: axes of nearly equal variances are any axes of their plane, their sums are not."""
    forward, inverse = components.forward, components.inverse
    return [components.mean, components.sink, components.covariance, forward @ forward.mT, forward @ inverse]


def test_in_one_go_it_is_what_the_files_say(tiny_params, tiny_calibration, tiny_fitted, hf_engine, calib_windows):
    """To rounding (where a tensor lies in memory decides how a product is rounded), from one pass over the windows."""
    recipes, calls = [Recipe(k=KltStream(bits=2), v=KltStream(bits=2)), studied_recipe(tiny_params)], []

    class Counting:
        name, info, dtype, device = hf_engine.name, hf_engine.info, hf_engine.dtype, hf_engine.device
        model = hf_engine.model

        def score(self, ids, first, tap):
            calls.append(tuple(ids))
            return hf_engine.score(ids, first, tap)

    ids, corpus_hash = calib_windows.calib[:, :64].tolist(), calib_windows.corpus_hash
    found = calibrate(Counting(), ids, recipes, corpus_hash=corpus_hash, context=64, layers=[1, 2])
    assert calls == [tuple(window) for window in ids]
    filed = calibration.load(tiny_fitted, resolve(tiny_params.model).model_hash)
    assert (found.origin, found.corpus_hash) == (filed.origin, filed.corpus_hash)
    for layer in range(3):
        for ours, theirs in ((found.whiteners, filed.whiteners), (found.rotated, filed.rotated)):
            assert torch.equal(ours[layer].chol, theirs[layer].chol)
            assert torch.equal(ours[layer].inv_chol, theirs[layer].inv_chol)
        for stream in "kv":
            pair = (determined(each.components[stream][layer]) for each in (found, filed))
            for ours, theirs in zip(*pair, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
            ours, theirs = (each.components[stream][layer].variance for each in (found, filed))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3 * float(theirs.max()))
    assert len(found.tables) == 2
    assert all(torch.equal(table, filed.tables[key]) for key, table in found.tables.items())
    for one in recipes:
        assert found.stream(one.k, "k") and found.stream(one.v, "v")


@pytest.mark.parametrize(
    ("windows", "context", "sample"), [([], None, 4), ([[1] * 9, [1] * 8], 4, 4), ([[1] * 9], 10, 4), ([[1] * 9], 4, 0)]
)
def test_windows_that_cannot_be_are_refused_in_one_line(hf_engine, windows, context, sample):
    with refused_in_one_line(UserError, "user.calibration-windows", f"{len(windows)} windows"):
        calibrate(hf_engine, windows, [], corpus_hash="c", context=context, sample=sample)


def test_only_what_a_recipe_reads_is_fitted(tiny_params, tiny_calibration, hf_engine):
    captured = Captured(tiny_calibration["capture"], hf_engine.info.model_hash)
    half = fitted(captured, hf_engine.info, [Recipe(k=KltStream(bits=2), v=IDENTITY.v)])
    assert set(half.components) == {"k"} and not half.tables
    both = fitted(captured, hf_engine.info, [Recipe(k=KltStream(bits=2), v=KltStream(bits=2))])
    assert set(both.components) == {"k", "v"} and both.calibration_hash != half.calibration_hash
    after = fitted(captured, hf_engine.info, [studied_recipe(tiny_params)], placement="post_rope", layers=[1])
    assert {key[:2] for key in after.tables} == {("k", "post_rope"), ("v", "pre_rope")}


def test_k_after_its_rotary_embedding_has_components_of_its_own(tiny_params, tiny_calibration, hf_engine):
    """About the same means; covariance and metric turned over the positions of a run, not the windows' own."""
    captured = Captured(tiny_calibration["capture"], hf_engine.info.model_hash)
    recipes = [recipe("klt", 3), recipe("klt", 3, rotary="after")]
    both, alone = fitted(captured, hf_engine.info, recipes), fitted(captured, hf_engine.info, recipes[1:])
    assert set(alone.components) == {"v"} and set(both.components) == {"k", "v"}
    for layer in range(3):
        before, after = both.components["k"][layer], both.turned[layer]
        assert torch.equal(after.mean, before.mean) and torch.equal(after.sink, before.sink)
        cos, sin = rotary_angles(hf_engine.info, RUN)[layer]
        due = over_positions(before.covariance.double(), 2, cos, sin).float()
        torch.testing.assert_close(after.covariance, due, rtol=1e-4, atol=1e-5)
        seen = ErrorMetrics(hf_engine.info, captured.context).k(layer, ridged_sigma(both.whiteners[layer]))
        form = ridged(over_positions(seen, 1, cos, sin), tiny_params.calibration.ridge)
        size = after.head_metric.diagonal(dim1=-2, dim2=-1) / form.diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(size, size[:, :1].expand_as(size), rtol=1e-3, atol=0)
    for one in (both, alone):
        k, v = (one.stream(getattr(recipes[1], s), s, "post_rope", by_position=True) for s in "kv")
        assert k.components is one.turned and [*k.spectra] == [*v.spectra] == [(s, n) for s in "kv" for n in range(3)]
        assert all(torch.equal(k.spectra["k", n], both.turned[n].variance) for n in range(3))


def test_nan_in_a_window_is_refused_and_leaves_nothing(tiny_params, tiny_windows, hf_engine, tmp_path, monkeypatch):
    from kvlab.calibration import capture as module

    class Broken:
        name, info, dtype, device, closed = "hf", hf_engine.info, "float32", "cpu", False

        def score(self, ids, first, tap):
            tap(0, "k", torch.full((2, 96, 32), float("nan")))

        def close(self):
            self.closed = True

    broken = Broken()
    monkeypatch.setattr(module, "start", lambda *a, **k: broken)
    with refused(NonFinite, "non-finite.capture", "layer_0_k", "window 0"):
        capture(tiny_params, "hf", tiny_windows, tmp_path / "c.safetensors")
    assert list(tmp_path.iterdir()) == [] and broken.closed


def test_the_file_is_what_was_observed(tiny_params, tiny_calibration, hf_engine, calib_windows):
    windows = calib_windows.calib[:, :64].tolist()
    observed = observe(hf_engine, windows, 64, calib_windows.corpus_hash, 16, beside=("across",))
    filed = load_file(tiny_calibration["capture"])
    assert set(filed) == set(observed.tensors)
    assert all(torch.equal(tensor, filed[name]) for name, tensor in observed.tensors.items())
