"""Sigma_q, codebooks and components: the formulas, the formats, and whose they are."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvlab.calibration import load as calibration
from kvlab.calibration.calibrate import fitted
from kvlab.calibration.capture import Captured, capture
from kvlab.calibration.components import FIELDS, TURNED, fit_components
from kvlab.calibration.load import FittedFiles, by_origin
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.calibration.needs import needed_files
from kvlab.calibration.sigma import describe, second_moment
from kvlab.codecs.base import Site
from kvlab.codecs.block.studied import studied_recipe
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.oscar import OscarStream
from kvlab.codecs.recipes import named_recipe
from kvlab.codecs.registry import build
from kvlab.codecs.shared.grouping import joined
from kvlab.codecs.shared.metric import ridged
from kvlab.codecs.stream.published import read_centroids
from kvlab.core.errors import CalibrationMismatch
from kvlab.core.model import resolve
from kvlab.core.paramfile import overlay
from kvlab.core.recipe import IDENTITY, Recipe, digest
from kvlab.core.records import file_hash, from_header, to_header
from kvlab_pipeline.jobs.codebooks import fit_codebooks
from kvlab_pipeline.studies.mechanisms.plan import cells
from kvlab_pipeline.studies.settings import Settings
from refusals import refused, refused_in_one_line


def load_all(params: Settings, paths: dict, **changed) -> calibration.Calibrated:
    """The calibration with every file of `paths`."""
    fitted = FittedFiles(paths["sigma"], paths["codebooks"], paths["components"])
    return calibration.load(fitted, **{"model_hash": resolve(params.model).model_hash} | changed)


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


def test_components_are_stored_by_layer_and_stream(tiny_calibration):
    tensors = load_file(tiny_calibration["components"])
    streams = ("k", "v", TURNED)
    names = {f"layer_{layer}_{stream}_{name}" for layer in range(3) for stream in streams for name in FIELDS}
    assert set(tensors) == names
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    sidecar = json.loads(tiny_calibration["components"].with_suffix(".json").read_text())
    assert (sidecar["n_windows"], sidecar["n_tokens"], sidecar["head_dim"]) == (6, 6 * 64, 32)
    assert [row["kv_heads"] for row in sidecar["diagnostics"]] == [[0, 1]] * 3 * 2
    assert all(row["coding_gain_db"] > 0 and row["condition"] > 1 for row in sidecar["diagnostics"])


def test_components_are_those_of_the_context_in_the_metric_of_what_errors_do(tiny_params, tiny_calibration, everything):
    """The weighted error of x is the plain error of its components, on the context and not after it."""
    calibrated, metrics = load_all(tiny_params, tiny_calibration), ErrorMetrics(resolve(tiny_params.model), 64)
    for stream in "kv":
        found = calibrated.components[stream][1]
        contexts = everything[f"layer_1_{stream}"][:, :, :64].transpose(0, 1).double()
        rows = contexts[:, :, 1:].reshape(2, -1, 32)
        torch.testing.assert_close(found.mean.double(), rows.mean(1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.sink.double(), contexts[:, :, 0].mean(1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.covariance[0].double(), torch.cov(joined(rows, 1)[0].mT))
        chol = calibrated.whiteners[1].chol.double()
        metric = ridged(metrics.k(1, chol @ chol.mT) if stream == "k" else metrics.v(1), tiny_params.calibration.ridge)
        loss, power = load_file(tiny_calibration["capture"])[f"layer_1_{stream}_loss"], rows.var(1)
        metric *= ((loss * power).sum(1) / (metric.diagonal(dim1=1, dim2=2) * power).sum(1))[:, None, None]
        scale = metric.diagonal(dim1=1, dim2=2).mean()
        torch.testing.assert_close(found.head_metric / scale, metric / scale, atol=1e-4, rtol=1e-3)
        identity = found.forward.double() @ found.inverse.double()
        torch.testing.assert_close(identity, torch.eye(64).double()[None], atol=1e-3, rtol=0)


def test_k_after_its_rotary_embedding_is_fitted_as_kvlab_calibrate_does(tiny_params, tiny_calibration):
    """Of the same capture; a cell names what it reads there by what that holds."""
    calibrated, info = load_all(tiny_params, tiny_calibration), resolve(tiny_params.model)
    recipe = named_recipe("klt", 2, rotary="after")
    own = fitted(Captured(tiny_calibration["capture"], info.model_hash), info, [recipe], tiny_params.calibration.ridge)
    assert calibrated.turned.keys() == own.turned.keys() == {0, 1, 2} and TURNED not in calibrated.components
    for layer, name in product(own.turned, FIELDS):
        due = getattr(own.turned[layer], name).float()  # but that its Sigma_q was not rounded to float32
        torch.testing.assert_close(
            getattr(calibrated.turned[layer], name), due, rtol=1e-3, atol=1e-4 * float(due.abs().max())
        )
    pages = {"pages": ("klt",), "bits": (2,), "codecs": (), "in_forward": (), "caches": ()}
    asked = tiny_params.model_copy(update={"mechanisms": tiny_params.mechanisms.model_copy(update=pages)})
    (cell,) = cells(asked, "vllm")
    found, name = calibrated.fingerprints(cell), "components/k/post_rope/1"
    changed = calibrated.turned | {1: replace(calibrated.turned[1], mean=calibrated.turned[1].mean + 1)}
    other = replace(calibrated, turned=changed).fingerprints(cell)
    assert {key for key in found if found[key] != other[key]} == {name}


def test_the_published_format_is_kept(tiny_calibration):
    tensors = load_file(tiny_calibration["sigma"])
    assert set(tensors) == {f"layer_{layer}_{kind}" for layer in range(3) for kind in ("chol", "inv_chol", "sigma")}
    for layer in range(3):
        chol, inverse = tensors[f"layer_{layer}_chol"], tensors[f"layer_{layer}_inv_chol"]
        assert chol.shape == (2, 32, 32) and chol.dtype == torch.float32
        torch.testing.assert_close(chol @ inverse, torch.eye(32).expand(2, 32, 32), atol=2e-5, rtol=0)
        assert torch.equal(chol, chol.tril())
    sidecar = json.loads(tiny_calibration["sigma"].with_suffix(".json").read_text())
    assert sidecar["n_passages_used"] == 6 and sidecar["n_tokens_pooled"] == 6 * 64
    assert len(sidecar["diagnostics"]) == 6


def test_tables_are_files_of_ascending_floats(tiny_calibration, tiny_params):
    folder = tiny_calibration["codebooks"].with_suffix("")
    names = {path.name for path in folder.iterdir()}
    recipes = [studied_recipe(tiny_params, ratio) for ratio in tiny_params.gap.variance_ratios]
    assert names > {f"{s.upper()}_{digest(getattr(recipe, s))}.f32" for recipe in recipes for s in "kv"}
    tables = json.loads(tiny_calibration["codebooks"].read_text())["tables"]
    assert sorted(table["file"] for table in tables) == sorted(names)
    for table in tables:
        assert read_centroids(folder / table["file"]).tolist() == table["centroids"]
        assert len(table["centroids"]) == 2 ** table["bits"] and (np.diff(table["centroids"]) > 0).all()


def test_a_fitted_table_is_never_worse_on_its_own_pool(tiny_calibration):
    for table in json.loads(tiny_calibration["codebooks"].read_text())["tables"]:
        assert table["mse_fitted"] <= table["mse_gaussian"] * (1 + 1e-6)
        assert table["n_samples"] > 1000


def test_calibrating_again_gives_the_same_bytes(tiny_params, tiny_calibration, tiny_windows, tmp_path):
    capture(tiny_params, "hf", tiny_windows, tmp_path / "c.safetensors", tiny_calibration["asked"])
    assert (tmp_path / "c.safetensors").read_bytes() == tiny_calibration["capture"].read_bytes()
    sigma, rotated = tiny_calibration["sigma"], tiny_calibration["rotated"]
    fit_codebooks(tiny_params, tmp_path / "c.safetensors", sigma, rotated, tmp_path / "cb.json")
    assert (tmp_path / "cb.json").read_bytes() == tiny_calibration["codebooks"].read_bytes()
    fit_components(tiny_params, tmp_path / "c.safetensors", tiny_calibration["sigma"], tmp_path / "p.safetensors")
    for suffix in (".safetensors", ".json"):
        again = (tmp_path / "p").with_suffix(suffix).read_bytes()
        assert again == tiny_calibration["components"].with_suffix(suffix).read_bytes()


def test_calibration_of_another_model_is_refused(tiny_params, tiny_calibration):
    with refused(CalibrationMismatch, "calibration.other-model", tiny_calibration["sigma"], "another"):
        load_all(tiny_params, tiny_calibration, model_hash="another")
    with refused(CalibrationMismatch, "calibration.other-model", tiny_calibration["capture"], "another"):
        Captured(tiny_calibration["capture"], "another")


def test_calibration_on_other_windows_than_are_scored_is_refused(tiny_params, tiny_calibration):
    with refused(CalibrationMismatch, "calibration.other-windows", "another"):
        load_all(tiny_params, tiny_calibration, corpus_hash="another")


def test_components_of_another_sigma_are_refused(tiny_params, tiny_calibration, tmp_path):
    """K was fitted in the metric of that Sigma_q; another would weigh other errors."""
    tensors, sidecar = load_file(tiny_calibration["sigma"]), tiny_calibration["sigma"].with_suffix(".json")
    tensors |= {"layer_0_chol": tensors["layer_0_chol"] * 2, "layer_0_inv_chol": tensors["layer_0_inv_chol"] / 2}
    save_file(tensors, tmp_path / "s.safetensors")
    (tmp_path / "s.json").write_text(sidecar.read_text())
    model_hash = resolve(tiny_params.model).model_hash
    with refused(CalibrationMismatch, "calibration.other-fit", "sigma_hash", "`kvlab step components`"):
        calibration.load(FittedFiles(tmp_path / "s.safetensors", None, tiny_calibration["components"]), model_hash)
    with refused(CalibrationMismatch, "calibration.other-sigma", "`kvlab step codebooks`"):
        calibration.load(FittedFiles(tmp_path / "s.safetensors", tiny_calibration["codebooks"]), model_hash)


@pytest.mark.parametrize("part", ["chol", "inv_chol", "sigma"])
def test_a_sigma_that_is_not_whole_is_refused(tiny_params, tiny_calibration, tmp_path, part):
    tensors = load_file(tiny_calibration["sigma"])
    (tmp_path / "s.json").write_text(tiny_calibration["sigma"].with_suffix(".json").read_text())
    one = f"layer_1_{part}"
    without_one = {name: tensor for name, tensor in tensors.items() if name != one}
    without_a_layer = {name: tensor for name, tensor in tensors.items() if not name.startswith("layer_2")}
    changed = [("damaged", one, without_one), ("incomplete", "layer 2", without_a_layer)]
    if part != "sigma":
        changed.append(("damaged", "layer 1", tensors | {one: tensors[one] * 2}))
    for code, place, wrong in changed:
        save_file(wrong, tmp_path / "s.safetensors")
        with refused(CalibrationMismatch, f"calibration.{code}", place, "`kvlab step sigma`"):
            load_all(tiny_params, tiny_calibration | {"sigma": tmp_path / "s.safetensors"})


def test_sigma_of_another_capture_fits_no_components(tiny_params, tiny_calibration, tmp_path):
    (tmp_path / "s.safetensors").write_bytes(tiny_calibration["sigma"].read_bytes())
    facts = json.loads(tiny_calibration["sigma"].with_suffix(".json").read_text())
    (tmp_path / "s.json").write_text(json.dumps(facts | {"calibration_source": "vllm"}))
    with refused(CalibrationMismatch, "calibration.other-capture", tiny_calibration["capture"]):
        fit_components(tiny_params, tiny_calibration["capture"], tmp_path / "s.safetensors", tmp_path / "p.safetensors")
    assert not (tmp_path / "p.safetensors").exists()


def test_a_file_that_holds_no_components_says_what_to_run(tiny_params, tiny_calibration, tmp_path):
    (tmp_path / "p.safetensors").write_bytes(b"short")
    with refused(CalibrationMismatch, "calibration.unreadable", "`kvlab step components`"):
        load_all(tiny_params, tiny_calibration | {"components": tmp_path / "p.safetensors"})
    save_file({"a": torch.zeros(1)}, tmp_path / "q.safetensors")
    with refused(CalibrationMismatch, "calibration.other-file", "'model_hash'", "`kvlab step components`"):
        load_all(tiny_params, tiny_calibration | {"components": tmp_path / "q.safetensors"})


def test_the_calibration_hash_covers_every_file(tiny_params, tiny_calibration):
    model_hash = resolve(tiny_params.model).model_hash
    sigma, codebooks, components = (tiny_calibration[name] for name in ("sigma", "codebooks", "components"))
    choices = [FittedFiles(sigma, c, p) for c in (codebooks, None) for p in (components, None)]
    assert len({calibration.load(fitted, model_hash).calibration_hash for fitted in choices}) == 4


def test_each_recipe_gets_what_it_needs_and_nothing_else(tiny_params, tiny_calibration):
    calibrated = load_all(tiny_params, tiny_calibration)
    for stream in "kv":
        klt = calibrated.stream(named_recipe("klt", params=tiny_params).k, stream)
        assert klt.components is calibrated.components[stream] and klt.centroids is None
        centred = named_recipe("int+center+whiten", 3, params=tiny_params)
        assert calibrated.stream(getattr(centred, stream), stream).components is calibrated.components[stream]
        oscar = named_recipe("oscar", 2, params=tiny_params)
        assert bool(calibrated.stream(getattr(oscar, stream), stream).whiteners) == (stream == "k")
        for bare in (named_recipe("int", 3, params=tiny_params), named_recipe("fp8", params=tiny_params), IDENTITY):
            assert calibrated.stream(getattr(bare, stream), stream) is None
        assert calibrated.stream(getattr(studied_recipe(tiny_params), stream), stream).centroids is not None


def test_a_table_of_another_recipe_is_refused(tiny_params, tiny_calibration):
    calibrated = load_all(tiny_params, tiny_calibration)
    assert calibrated.stream(studied_recipe(tiny_params).k, "k").centroids is not None
    other = Settings.complete(overlay(tiny_params.model_dump(mode="json"), {"bits": 5}))
    with refused(CalibrationMismatch, "calibration.no-codebook", "bits 5"):
        calibrated.stream(studied_recipe(other).k, "k")


def test_k_after_its_rotation_has_its_own_whitener_and_table(tiny_params, tiny_fitted):
    """Without them a post_rope cell is refused, and so is the one file in the other's place."""
    fitted = tiny_fitted
    model_hash = resolve(tiny_params.model).model_hash
    calibrated = calibration.load(fitted, model_hash)
    recipe = studied_recipe(tiny_params)
    before, after = (calibrated.stream(recipe.k, "k", placement) for placement in ("pre_rope", "post_rope"))
    assert not torch.equal(before.whiteners[1].chol, after.whiteners[1].chol)
    assert not torch.equal(before.centroids, after.centroids)
    assert calibrated.stream(recipe.v, "v", "post_rope").centroids is not None
    without = calibration.load(replace(fitted, rotated=None), model_hash).stream(recipe.k, "k", "post_rope")
    with refused(CalibrationMismatch, "calibration.missing", "layer 1"):
        build(recipe.k, without).encode(torch.randn(2, 8, 32), Site(0, 1, "k"))
    with refused(CalibrationMismatch, "calibration.not-rotated", fitted.sigma):
        calibration.load(replace(fitted, rotated=fitted.sigma), model_hash)


@pytest.mark.parametrize(
    ("recipe", "reads_components"),
    [
        (KltStream(bits=2), True),
        (HadamardStream(bits=2, center=True), True),
        (HadamardStream(bits=2, whiten=True), False),
        (OscarStream(bits=2), False),  # rotates K by Sigma_q, of which there is one after the embedding
    ],
)
def test_components_of_k_do_not_serve_k_after_its_rotation(tiny_params, tiny_fitted, recipe, reads_components):
    calibrated = calibration.load(tiny_fitted, resolve(tiny_params.model).model_hash)
    if reads_components:
        with refused_in_one_line(CalibrationMismatch, "calibration.pre-rope-only", "pre_rope", recipe.codec):
            calibrated.stream(recipe, "k", "post_rope")
        assert calibrated.stream(recipe, "k").components and calibrated.stream(recipe, "v", "post_rope").components
    else:
        given = calibrated.stream(recipe, "k", "post_rope")
        assert given.whiteners is calibrated.rotated and given.components == {}


def test_a_rotated_sigma_of_another_sigma_is_refused(tiny_params, tiny_fitted, tmp_path):
    model_hash, fitted = resolve(tiny_params.model).model_hash, tiny_fitted
    rotated = tmp_path / "r.safetensors"
    facts = json.loads(fitted.rotated.with_suffix(".json").read_text())
    rotated.write_bytes(fitted.rotated.read_bytes())
    rotated.with_suffix(".json").write_text(json.dumps(facts | {"sigma_hash": "other"}))
    with refused(CalibrationMismatch, "calibration.other-sigma", rotated):
        calibration.load(replace(fitted, rotated=rotated), model_hash)
    save_file(load_file(fitted.rotated), rotated)  # the same numbers in another file, with its own sidecar
    rotated.with_suffix(".json").write_text(json.dumps(facts | {"file_hash": file_hash(rotated)}))
    with refused(CalibrationMismatch, "calibration.other-sigma", rotated, fitted.codebooks):
        calibration.load(replace(fitted, rotated=rotated), model_hash)


def test_files_find_each_other_by_origin(tiny_calibration):
    sigma, codebooks, components, rotated = (
        tiny_calibration[name] for name in ("sigma", "codebooks", "components", "rotated")
    )
    assert by_origin([sigma], [codebooks], [components], [rotated]) == {
        "hf": FittedFiles(sigma, codebooks, components, rotated)
    }
    for twice in ([[sigma, sigma]], [[sigma], [codebooks, codebooks]]):
        with refused(CalibrationMismatch, "calibration.second-file", "hf"):
            by_origin(*twice)
    with refused(CalibrationMismatch, "calibration.no-sigma", "hf"):
        by_origin([], [codebooks])


def test_a_broken_capture_file_says_what_to_run(tmp_path):
    (tmp_path / "c.safetensors").write_bytes(b"short")
    with refused(CalibrationMismatch, "calibration.unreadable", "`kvlab step capture`"):
        Captured(tmp_path / "c.safetensors", "x")
    save_file({"a": torch.zeros(1)}, tmp_path / "d.safetensors")
    with refused(CalibrationMismatch, "calibration.other-file", "`kvlab step capture`"):
        Captured(tmp_path / "d.safetensors", "x")


def test_what_is_no_capture_is_refused_when_it_is_opened(tiny_params, tiny_calibration, tmp_path):
    """Also the calibration's own files, which carry the same identity."""
    model_hash = resolve(tiny_params.model).model_hash
    for name in ("sigma", "components"):
        with refused(CalibrationMismatch, "calibration.other-file", "'context'", "`kvlab step capture`"):
            Captured(tiny_calibration[name], model_hash)
    with safe_open(tiny_calibration["capture"], "pt") as file:
        facts = from_header(file.metadata())
    whole = load_file(tiny_calibration["capture"])
    part = {name: tensor for name, tensor in whole.items() if name != "layer_1_k_scatter"}
    for tensors in ({"layer_0_q_count": torch.zeros(1)}, {"a": torch.zeros(1)}, part):
        save_file(tensors, tmp_path / "c.safetensors", metadata=to_header(facts))
        with refused(CalibrationMismatch, "calibration.incomplete", "`kvlab step capture`"):
            Captured(tmp_path / "c.safetensors", model_hash)
    save_file({"a": torch.zeros(1)}, tmp_path / "c.safetensors", metadata={"kvlab": "{"})
    with refused(CalibrationMismatch, "calibration.other-file", "'engine'"):
        Captured(tmp_path / "c.safetensors", model_hash)


@pytest.mark.parametrize("sidecar", ["{}", "[]", '{"model_hash": 1}'])
def test_a_sidecar_that_is_none_says_what_to_run(tiny_params, tiny_calibration, tmp_path, sidecar):
    (tmp_path / "s.safetensors").write_bytes(tiny_calibration["sigma"].read_bytes())
    (tmp_path / "s.json").write_text(sidecar)
    with refused(CalibrationMismatch, "calibration.other-file", "`kvlab step sigma`"):
        load_all(tiny_params, tiny_calibration | {"sigma": tmp_path / "s.safetensors"})


@pytest.mark.parametrize("table", [{}, [], {"stream_recipe_id": "a", "centroids": ["x"]}])
def test_tables_that_are_none_say_what_to_run(tiny_params, tiny_calibration, tmp_path, table):
    facts = json.loads(tiny_calibration["codebooks"].read_text()) | {"tables": [table]}
    (tmp_path / "c.json").write_text(json.dumps(facts))
    with refused(CalibrationMismatch, "calibration.not-a-table", "`kvlab step codebooks`"):
        load_all(tiny_params, tiny_calibration | {"codebooks": tmp_path / "c.json"})


def test_the_files_that_a_recipe_needs(tiny_params):
    def needed(k, v=None):
        return needed_files(Recipe(k=k, v=v or IDENTITY.v))

    studied = studied_recipe(tiny_params)
    plain = studied.v.model_copy(update={"codebook": "gaussian"})
    assert needed(IDENTITY.k) == needed(HadamardStream(bits=2)) == needed(plain) == []
    assert needed(HadamardStream(bits=2, whiten=True)) == needed(OscarStream(bits=2)) == ["sigma"]
    assert needed(HadamardStream(bits=2, center=True)) == needed(IDENTITY.k, OscarStream(bits=2))
    assert needed(KltStream(bits=2)) == ["sigma", "components"]
    assert needed_files(studied) == ["sigma", "codebooks"]
