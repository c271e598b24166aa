import json
import shutil
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from kvlab.errors import (
    CodecNotActive,
    Fault,
    MissingResult,
    MixedIdentity,
    NonFinite,
    StaleResult,
)
from kvlab.experiments import plan
from kvlab.records import read_job, read_json, read_tokens, write_job, write_json, write_table
from kvlab.report.gather import comparable, gather
from kvlab.report.metrics import build, summary
from kvlab.report.studies.agreement import agreement_entry
from kvlab.report.studies.gap import gap_entry
from kvlab.report.studies.layers import additivity_entries, layer_entries
from kvlab.report.studies.noise import noise_slope_entries
from kvlab.stats.bootstrap import Bootstrap
from report.synthetic import Effects, Paths, provenance, small_params, write_results

ESTIMATE = {"value", "low", "high", "n_windows", "n_tokens", "resolvable", "method"}


def run(params, paths):
    return build(params, paths.baseline, paths.jobs, paths.codebooks, paths.sigmas)


def collect(params, paths):
    return gather(params, paths.baseline, paths.jobs)


@pytest.fixture(scope="module")
def params():
    return small_params()


@pytest.fixture(scope="module")
def whole(params, tmp_path_factory):
    return write_results(tmp_path_factory.mktemp("whole"), params)


@pytest.fixture(scope="module")
def metrics(params, whole):
    return run(params, whole)


@pytest.fixture
def paths(whole, tmp_path):
    """A copy of the planted results that a test may spoil."""
    origin = whole.codebooks.parents[2]
    shutil.copytree(origin, tmp_path, dirs_exist_ok=True)

    def moved(path):
        return tmp_path / path.relative_to(origin)

    return Paths(
        baseline=[moved(path) for path in whole.baseline],
        jobs=[moved(path) for path in whole.jobs],
        codebooks=moved(whole.codebooks),
        sigmas=[moved(path) for path in whole.sigmas],
    )


def covers(estimate, truth):
    return estimate["low"] <= truth <= estimate["high"]


def estimates(data):
    if isinstance(data, dict):
        if "resolvable" in data:
            yield data
        for value in data.values():
            yield from estimates(value)
    elif isinstance(data, list):
        for value in data:
            yield from estimates(value)


def edit_job(paths, study, change, index=0):
    """Rewrite the index-th job of a study through `change(record, tokens) -> (record, tokens)`."""
    path = [path for path in paths.jobs if path.parent.name == study][index]
    write_job(path, *change(*read_job(path)))


def edit_cells(record, change, only=lambda cell: True):
    cells = tuple(change(cell) if only(cell) else cell for cell in record.cells)
    return record.model_copy(update={"cells": cells})


# ------------------------------------------------------------------------------------- what comes out


def test_top_level_shape(metrics, params):
    assert set(metrics) == {
        *("identity", "sizes", "floor", "baseline", "agreement", "agreement_why", "gap", "cells", "layers"),
        *("additivity", "noise", "noise_slope", "codebooks", "sigma"),
    }
    json.dumps(metrics, allow_nan=False)
    assert metrics["sizes"] == {"context": 64, "eval": 17, "windows": 12, "confidence": 0.95, "resamples": 600}
    assert metrics["identity"]["calibration_corpus_hash"] == metrics["identity"]["corpus_hash"] == "c" * 16
    assert set(metrics["identity"]["recipes"]) >= {cell["recipe_id"] for cell in metrics["cells"]}
    assert len(metrics["cells"]) == sum(len(c) for c in plan.jobs(params, "cells").values())


def test_every_interval_is_an_interval(metrics):
    found = list(estimates(metrics))
    assert len(found) > 300
    for estimate in found:
        assert set(estimate) == ESTIMATE
        assert estimate["low"] <= estimate["value"] <= estimate["high"]
        assert estimate["resolvable"] == pytest.approx((estimate["high"] - estimate["low"]) / 2)
        assert (estimate["n_windows"], estimate["n_tokens"]) == (12, 192)


def test_gap_recovers_what_was_planted(metrics):
    gap, effects = metrics["gap"], Effects()
    assert gap["factors"] == ["engine", "protocol", "variance_ratio"]
    assert gap["low"] == {"engine": "hf", "protocol": "snapshot", "variance_ratio": 1.0}
    assert gap["high"] == {"engine": "vllm", "protocol": "in_forward", "variance_ratio": 0.95}
    kl = gap["measures"]["kl"]
    assert kl["low"]["value"] == pytest.approx(effects.base)
    assert kl["gap"]["value"] == pytest.approx(0.067)
    shares = {part["factor"]: part["share"] for part in kl["parts"]}
    planted = {"engine": 0.0025, "protocol": 0.0045, "variance_ratio": 0.060}  # the pair is halved
    assert {name: share["value"] for name, share in shares.items()} == pytest.approx(planted)
    assert all(covers(shares[name], value) for name, value in planted.items())
    pairs = {tuple(row["factors"]): row["effect"] for row in kl["interactions"]}
    assert pairs["engine", "protocol"]["value"] == pytest.approx(0.001)
    assert pairs["engine", "variance_ratio"]["value"] == pytest.approx(0, abs=1e-12)


def test_parts_sum_to_the_gap_in_both_measures(metrics):
    for measure in metrics["gap"]["measures"].values():
        total = sum(part["share"]["value"] for part in measure["parts"])
        assert total == pytest.approx(measure["gap"]["value"], rel=1e-12)
        assert len(measure["corners"]) == 8
        corner = {(c["engine"], c["protocol"], c["variance_ratio"]): c["value"]["value"] for c in measure["corners"]}
        assert corner["vllm", "in_forward", 0.95] - corner["hf", "snapshot", 1.0] == pytest.approx(total)
        assert corner["vllm", "snapshot", 1.0] != corner["hf", "in_forward", 1.0]


def test_shares_are_paired(metrics):
    """The corners scatter with the text; what a factor adds scatters far less."""
    kl = metrics["gap"]["measures"]["kl"]
    engine = next(part["share"] for part in kl["parts"] if part["factor"] == "engine")
    assert engine["resolvable"] < 0.15 * kl["high"]["resolvable"]


def test_cells(metrics):
    cell = next(
        c
        for c in metrics["cells"]
        if (c["label"], c["engine"], c["dtype"], c["protocol"], c["variance_ratio"])
        == ("kv", "hf", "bfloat16", "in_forward", 1.0)
    )
    assert cell["kl"]["value"] == pytest.approx(0.014)
    assert cell["kl_net"]["value"] == pytest.approx(0.014 - 1e-4)
    assert cell["delta_nll"]["value"] == pytest.approx(0.8 * 0.014)
    assert cell["d_eff_mean"] == {"k": 31.75, "v": 31.75}
    assert cell["outlier_rate"] == {"k": 0.045, "v": 0.0}
    assert cell["bits_per_value"] == pytest.approx(8 * (4 * 450 + 2 * 2000) / 6000)
    assert list(cell["kl_percentiles"]) == ["50", "95", "99", "99.9"]
    assert sorted(cell["kl_percentiles"].values()) == list(cell["kl_percentiles"].values())
    assert sum(row["n_tokens"] for row in cell["kl_by_confidence"]) == 192
    assert [row["low"] for row in cell["kl_by_confidence"]] == [0.0, 0.25, 0.5, 0.75, 0.95]
    flips = cell["flips_to_wrong"]["value"] + cell["flips_to_right"]["value"]
    assert 0 < flips <= 1 - cell["top1_agreement"]["value"] + 1e-12
    identity = next(c for c in metrics["cells"] if c["role"] == "identity")
    assert identity["kl_net"]["value"] == 0 and identity["variance_ratio"] is None


def test_flips_are_counted_by_the_label(params, paths):
    """Plant three flips: right to wrong, wrong to right, wrong to wrong."""

    def plant(record, tokens):
        first = record.cells[0].cell_id
        labels = tokens["label"]
        wrong = (labels + 1).cast(pl.Int32)
        reference = wrong.to_list()
        alternative = reference.copy()
        reference[0], alternative[0] = labels[0], wrong[0]
        alternative[1] = labels[1]
        alternative[2] = labels[2] + 2
        planted = tokens.with_columns(
            top1_ref=pl.Series(reference, dtype=pl.Int32), top1_alt=pl.Series(alternative, dtype=pl.Int32)
        )
        assert tokens["cell_id"][0] == first
        return record, planted

    edit_job(paths, "cells", plant)
    cell = run(params, paths)["cells"][0]
    assert cell["flips_to_wrong"]["value"] == pytest.approx(1 / 192)
    assert cell["flips_to_right"]["value"] == pytest.approx(1 / 192)
    assert cell["top1_agreement"]["value"] == pytest.approx(189 / 192)


def test_published_estimator_is_the_mean_of_window_ratios(params, paths):
    record, tokens = read_job(paths.jobs[0])
    rows = tokens.filter(pl.col("cell_id") == record.cells[0].cell_id)
    delta = (rows["nll_alt"] - rows["nll_ref"]).to_numpy().reshape(12, -1).mean(1)
    cell = next(c for c in run(params, paths)["cells"] if c["cell_id"] == record.cells[0].cell_id)
    assert cell["published_estimator"]["value"] == pytest.approx(np.mean(np.exp(delta) - 1))
    assert cell["ppl_ratio"]["value"] == pytest.approx(np.exp(delta.mean()))


def test_floor_and_baseline(metrics):
    assert metrics["floor"]["hf"]["identity_snapshot"]["value"] == pytest.approx(1e-4)
    assert metrics["floor"]["vllm"]["rerun"]["value"] == pytest.approx(2.5e-5)
    rows = {row["run"]: row for row in metrics["baseline"]}
    assert list(rows) == [
        *("hf-float32-eager", "hf-float32-sdpa", "hf-bfloat16-eager", "hf-bfloat16-sdpa"),
        *("vllm-float32-default", "vllm-bfloat16-default"),
    ]
    assert rows["hf-bfloat16-sdpa"]["kl"]["value"] == pytest.approx(1e-3)
    assert rows["hf-float32-eager"]["top1_agreement"]["method"] == "exact"


def test_layers_and_additivity(metrics):
    effects = Effects()
    rows = [row for row in metrics["layers"] if row["engine"] == "hf"]
    assert [row["layer"] for row in rows] == [0, 1, 2, 3, 4, 5, None]
    assert [row["kl"]["value"] for row in rows[:6]] == pytest.approx(effects.layer_kl)
    assert all(row["q_value"] < 0.01 for row in rows[:5])
    assert rows[5]["q_value"] > 0.5  # planted: coding layer 5 does nothing
    assert rows[6]["q_value"] is None
    entry = metrics["additivity"][0]
    assert entry["ratio"]["value"] == pytest.approx(1.3, rel=1e-5)
    assert covers(entry["ratio"], 1.3) and entry["ratio"]["low"] > 1
    assert entry["interaction"]["value"] == pytest.approx(0.3 * sum(effects.layer_kl), rel=1e-5)


def test_layers_are_judged_against_the_floor(tmp_path):
    """Planted in a dtype with a floor of 1e-4: layer 5 costs exactly the floor, which is nothing."""
    params = small_params(layers={"dtype": "bfloat16"})
    layer_kl = (0.012, 0.004, 0.003, 0.002, 0.0015, 1e-4)
    metrics = run(params, write_results(tmp_path, params, Effects(layer_kl=layer_kl)))
    rows = [row for row in metrics["layers"] if row["engine"] == "hf"]
    assert rows[4]["q_value"] < 0.01 and rows[5]["q_value"] > 0.2
    entry = metrics["additivity"][0]
    assert entry["sum"]["value"] == pytest.approx(sum(layer_kl) - 6e-4)
    assert entry["joint"]["value"] == pytest.approx(1.3 * sum(layer_kl) - 1e-4)


def test_noise_slope(params, tmp_path):
    planted = Effects(noise_saturation=1e9, noise_coefficient={"k": 0.9, "v": 0.3, "kv": 1.0})
    metrics = run(params, write_results(tmp_path, params, planted))
    slopes = {(row["engine"], row["stream"]): row for row in metrics["noise_slope"]}
    assert slopes["hf", "k"]["slope"]["value"] == pytest.approx(2)
    assert slopes["hf", "k"]["range"] == [0.01, 0.3]  # 0.9 nats at sigma 1 is beyond the range
    assert slopes["hf", "v"]["range"] == [0.01, 1.0]
    assert len(metrics["noise"]) == 2 * 2 * 5


def test_noise_slope_is_none_without_two_points(params, tmp_path):
    planted = Effects(noise_saturation=1e9, noise_coefficient={"k": 1e6, "v": 1e-12, "kv": 1.0})
    metrics = run(params, write_results(tmp_path, params, planted))
    assert all(row["slope"] is None and row["range"] is None for row in metrics["noise_slope"])


def test_sigma_and_codebooks(metrics):
    assert metrics["sigma"]["drift"]["trace_difference_max"] == pytest.approx(0.01)
    assert metrics["sigma"]["hf"]["off_diagonal_ratio_median"] == 3
    assert metrics["sigma"]["hf"]["condition_max"] == 1001
    assert [table["name"] for table in metrics["codebooks"]] == ["K_vr0.95", "V_vr0.95", "K_vr1", "V_vr1"]


def test_summary_is_flat(metrics):
    found = summary(metrics)
    assert found["kl.share.variance_ratio"] == pytest.approx(0.06)
    assert found["engines_agree"] is True
    assert all(isinstance(value, float | bool) for value in found.values())


# ---------------------------------------------------------------------------------- agreement


def test_agreement_holds(metrics):
    agreement = metrics["agreement"]
    assert agreement["holds"] and agreement["why"] == []
    assert agreement["identity"]["snapshot"]["value"] == pytest.approx(3e-8)
    assert agreement["codec"]["in_forward"]["relative_difference"]["value"] == pytest.approx(0.001)
    assert agreement["codec"]["in_forward"]["hf_kl"] == pytest.approx(0.014)


@pytest.mark.parametrize(
    ("effects", "words"),
    [
        (Effects(cross_identity=2e-6), "without codec"),
        (Effects(codec_disagreement=0.1), "2%"),
        (Effects(codec_disagreement=-0.1), "2%"),
    ],
)
def test_agreement_fails(params, tmp_path, effects, words):
    agreement = run(params, write_results(tmp_path, params, effects))["agreement"]
    assert not agreement["holds"]
    assert len(agreement["why"]) == 2 and words in agreement["why"][0]


def test_agreement_fails_when_the_runs_are_further_apart_than_rounding_explains(params, tmp_path):
    paths = write_results(tmp_path, params, Effects(cross_codec=1e-3, rounding=1e-6))
    agreement = run(params, paths)["agreement"]
    assert not agreement["holds"] and "rounding error" in agreement["why"][0]


def test_agreement_holds_while_a_difference_is_not_resolved(params, tmp_path):
    agreement = run(params, write_results(tmp_path, params, Effects(codec_disagreement=0.02)))["agreement"]
    assert agreement["holds"]
    relative = agreement["codec"]["snapshot"]["relative_difference"]
    assert relative["low"] < 0.02 < relative["high"]


# ------------------------------------------------------------------------------ smaller studies


@pytest.mark.parametrize(
    ("changes", "factors"),
    [
        ({"engines": ["hf"]}, ["protocol", "variance_ratio"]),
        ({"engines": ["vllm"]}, ["protocol", "variance_ratio"]),
        ({"protocols": ["in_forward"]}, ["engine", "variance_ratio"]),
        ({"engines": ["hf"], "protocols": ["snapshot"]}, ["variance_ratio"]),
        ({"gap": {"variance_ratios": [1.0, 1.0]}}, ["engine", "protocol"]),
        ({"gap": {"streams": ["k"]}}, ["engine", "protocol", "variance_ratio"]),
    ],
)
def test_a_factor_with_one_level_is_dropped(tmp_path, changes, factors):
    params = small_params(**changes)
    metrics = run(params, write_results(tmp_path, params))
    assert metrics["gap"]["factors"] == factors
    kl = metrics["gap"]["measures"]["kl"]
    assert len(kl["corners"]) == 2 ** len(factors)
    assert set(kl["corners"][0]) == {"engine", "protocol", "variance_ratio", "value"}
    total = sum(part["share"]["value"] for part in kl["parts"])
    assert total == pytest.approx(kl["gap"]["value"], rel=1e-12)
    if len(params.engines) == 1:
        assert metrics["agreement"] is None and params.engines[0] in metrics["agreement_why"][0]
        assert metrics["sigma"]["drift"] is None


def test_fewer_windows_in_the_layer_and_noise_studies(tmp_path):
    params = small_params(layers={"windows": 8}, noise={"windows": 9})
    metrics = run(params, write_results(tmp_path, params))
    assert metrics["layers"][0]["kl"]["n_windows"] == metrics["additivity"][0]["ratio"]["n_windows"] == 8
    assert metrics["noise"][0]["kl"]["n_windows"] == metrics["noise_slope"][0]["slope"]["n_windows"] == 9


def test_layers_without_an_identity_cell_have_no_q_value(tmp_path):
    params = small_params(protocols=["snapshot"])  # the layer study stays in_forward
    metrics = run(params, write_results(tmp_path, params))
    assert {row["q_value"] for row in metrics["layers"]} == {None}
    rerun = next(cell for cell in metrics["cells"] if cell["role"] == "rerun")
    assert rerun["kl_net"] is None


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_hash": "other"}, "model_hash: 5555555555555555 | other"),
        ({"corpus_hash": "other"}, "corpus_hash"),
        ({"calibration_hash": "other"}, "calibration_hash"),
        ({"device": "cuda"}, "device: cpu | cuda"),
        ({"versions": {"kvlab": "0.2.0", "python": "3.11"}}, "versions.kvlab: 0.1.0 | 0.2.0"),
        ({"versions": {"kvlab": "0.1.0"}}, "versions: kvlab | kvlab, python"),
    ],
)
def test_mixed_identity_is_refused(params, paths, changes, words):
    edit_job(paths, "noise", lambda r, t: (r.model_copy(update={"provenance": provenance(**changes)}), t), index=1)
    with pytest.raises(MixedIdentity) as caught:
        collect(params, paths)
    assert words in str(caught.value)


def test_mixed_identity_of_a_baseline_run_is_refused(params, paths):
    record = read_json(paths.baseline[1])
    record["provenance"]["model_hash"] = "other"
    write_json(paths.baseline[1], record)
    with pytest.raises(MixedIdentity, match="model_hash"):
        collect(params, paths)


def test_a_job_without_calibration_is_no_mixture(params, paths):
    without = provenance(calibration_hash=None)
    edit_job(paths, "noise", lambda r, t: (r.model_copy(update={"provenance": without}), t))
    assert collect(params, paths).provenance.calibration_hash == "a" * 16


def test_other_window_sizes_are_refused(params, paths):
    other = small_params(windows={"eval": 33})
    with pytest.raises(MixedIdentity, match=r"eval: 17 \| 33"):
        collect(other, paths)


def test_a_missing_job_is_named(params, paths):
    gone = paths.jobs.pop(3)
    with pytest.raises(MissingResult, match=rf"cell '.*kvlab measure --study cells --job {gone.stem}`"):
        collect(params, paths)


def test_a_missing_baseline_run_is_named(params, paths):
    paths.baseline.pop()
    with pytest.raises(MissingResult, match="vllm-bfloat16-default"):
        collect(params, paths)


def test_a_missing_cell_is_named(params, paths):
    def drop(record, tokens):
        gone = record.cells[0].cell_id
        kept = record.model_copy(update={"cells": record.cells[1:]})
        return kept, tokens.filter(pl.col("cell_id") != gone)

    edit_job(paths, "layers", drop)
    with pytest.raises(MissingResult, match="layer 0"):
        collect(params, paths)


def test_a_cell_of_other_parameters_is_refused(paths):
    with pytest.raises(StaleResult, match="not planned by these parameters"):
        collect(small_params(bits=4), paths)


def test_a_cell_that_is_there_twice_is_refused(params, paths):
    paths.jobs.append(paths.jobs[0])
    with pytest.raises(StaleResult, match="twice"):
        collect(params, paths)


@pytest.mark.parametrize("field", ["cell_id", "recipe_id"])
def test_an_id_that_is_not_that_of_its_content_is_refused(params, paths, field):
    def forge(record, tokens):
        first = record.cells[0]
        forged = edit_cells(record, lambda c: c.model_copy(update={field: "f" * 12}), lambda c: c is first)
        column = pl.col("cell_id").replace(first.cell_id, forged.cells[0].cell_id)
        return forged, tokens.with_columns(column)

    edit_job(paths, "cells", forge)
    with pytest.raises(StaleResult, match=f"{field} ffffffffffff is not that of its content"):
        collect(params, paths)


def test_a_forged_baseline_id_is_refused(params, paths):
    record, table = read_json(paths.baseline[0]), read_tokens(paths.baseline[0].with_suffix(".parquet"))
    record["cells"][0]["cell_id"] = "f" * 12
    write_json(paths.baseline[0], record)
    write_table(paths.baseline[0].with_suffix(".parquet"), table.with_columns(cell_id=pl.lit("f" * 12)))
    with pytest.raises(StaleResult, match="not that of its content"):
        collect(params, paths)


def test_rows_without_a_record_are_refused(params, paths):
    edit_job(paths, "cells", lambda r, t: (r.model_copy(update={"cells": r.cells[1:]}), t))
    with pytest.raises(StaleResult, match="the record names cells"):
        collect(params, paths)


@pytest.mark.parametrize("column", ["kl", "nll_alt", "p_ref_max"])
def test_non_finite_rows_are_refused(params, paths, column):
    path = paths.jobs[0].with_suffix(".parquet")
    table = read_tokens(path)
    write_table(
        path, table.with_columns(pl.when(pl.col("position") == 70).then(float("nan")).otherwise(column).alias(column))
    )
    with pytest.raises(NonFinite, match=column):
        collect(params, paths)


def test_negative_kl_is_refused(params, paths):
    edit_job(paths, "cells", lambda r, t: (r, t.with_columns(kl=-pl.col("kl"))))
    with pytest.raises(Fault, match="negative KL"):
        collect(params, paths)


@pytest.mark.parametrize("fires", [-1, 1])
def test_a_codec_that_did_not_fire_as_planned_is_refused(params, paths, fires):
    def misfire(cell):
        coding = cell.coding.model_copy(update={"fires": cell.coding.fires + fires})
        return cell.model_copy(update={"coding": coding})

    edit_job(paths, "cells", lambda r, t: (edit_cells(r, misfire, lambda c: c.cell.label == "kv"), t))
    with pytest.raises(CodecNotActive, match="fired"):
        collect(params, paths)


def test_a_codec_that_was_never_due_is_refused(params, paths):
    def idle(cell):
        return cell.model_copy(update={"coding": cell.coding.model_copy(update={"fires": 0, "expected_fires": 0})})

    edit_job(paths, "noise", lambda r, t: (edit_cells(r, idle), t))
    with pytest.raises(CodecNotActive, match="has to fire"):
        collect(params, paths)


def test_a_canary_without_effect_is_refused(params, tmp_path):
    with pytest.raises(CodecNotActive, match="one-bit"):
        collect(params, write_results(tmp_path, params, Effects(canary=0.99e-4)))


def test_other_windows_are_refused(params, paths):
    edit_job(paths, "cells", lambda r, t: (r, t.with_columns(window=pl.col("window") + 1)))
    with pytest.raises(MixedIdentity, match=r"windows: cell .* 1\.\.12.*expected: 0\.\.11"):
        collect(params, paths)


def test_other_positions_are_refused(params, paths):
    edit_job(paths, "cells", lambda r, t: (r, t.filter(pl.col("position") != 70)))
    with pytest.raises(MixedIdentity, match="positions"):
        collect(params, paths)


def test_other_labels_are_refused(params, paths):
    place = (pl.col("window") == 3) & (pl.col("position") == 70)
    label = pl.when(place).then(pl.col("label") + 1).otherwise("label").alias("label")
    edit_job(paths, "layers", lambda r, t: (r, t.with_columns(label)))
    with pytest.raises(MixedIdentity, match="label at window 3 position 70"):
        collect(params, paths)


def test_baseline_without_agreement_cells_is_named(params, paths):
    path = next(path for path in paths.baseline if path.stem == "vllm-float32-default")
    record, table = read_json(path), read_tokens(path.with_suffix(".parquet"))
    record["cells"] = [cell for cell in record["cells"] if cell["what"] == "plain"]
    write_json(path, record)
    kept = pl.col("cell_id") == record["cells"][0]["cell_id"]
    write_table(path.with_suffix(".parquet"), table.filter(kept))
    with pytest.raises(MissingResult, match="identity"):
        run(params, paths)


def test_calibration_of_another_model_is_refused(params, paths):
    for path in (paths.codebooks, paths.sigmas[1]):
        data = read_json(path)
        write_json(path, data | {"model_hash": "other"})
        with pytest.raises(MixedIdentity, match=r"model_hash: .*other"):
            run(params, paths)
        write_json(path, data)


def test_codebooks_without_a_used_table_are_refused(params, paths):
    data = read_json(paths.codebooks)
    write_json(paths.codebooks, data | {"tables": data["tables"][1:]})
    with pytest.raises(StaleResult, match="no table for stream recipe"):
        run(params, paths)


def test_every_comparison_passes_the_door(params, paths):
    """Cells changed behind gather's back are still caught by the functions that compare them."""
    results, boot = gather(params, paths.baseline, paths.jobs), Bootstrap(200, 0.95, 0)

    def with_other_device(study, dtype, role):
        cells = [
            replace(m, provenance=provenance(device="other"))
            if (m.cell.study, m.cell.dtype, m.cell.engine, m.role) == (study, dtype, "vllm", role)
            else m
            for m in results.cells
        ]
        return replace(results, cells=tuple(cells))

    for study, dtype, role, compare in (
        ("cells", "bfloat16", "codec", gap_entry),
        ("cells", "float32", "codec", agreement_entry),
        ("cells", "float32", "identity", layer_entries),
        ("cells", "float32", "identity", additivity_entries),
        ("cells", "float32", "identity", noise_slope_entries),
    ):
        with pytest.raises(MixedIdentity, match=r"device: cpu \| other"):
            compare(params, with_other_device(study, dtype, role), boot)


def test_recipes_that_differ_outside_the_factor_refuse_to_be_compared(params, paths):
    results = gather(params, paths.baseline, paths.jobs)
    corners = results.select("cells", "codec", dtype="bfloat16", stream="kv", label="kv")
    comparable(corners, {"engine", "protocol", "variance_ratio"})
    with pytest.raises(MixedIdentity) as caught:
        comparable(corners, {"engine", "protocol"})
    assert set(caught.value.fields) == {"recipe.k.variance_ratio", "recipe.v.variance_ratio"}
    first, second = corners[:2]
    k = second.cell.recipe.k.model_copy(update={"bits": 4})
    cell = second.cell.model_copy(update={"recipe": second.cell.recipe.model_copy(update={"k": k})})
    other = type(second)(
        second.record.model_copy(update={"cell": cell}), second.provenance, second.context, second.eval, second.tokens
    )
    with pytest.raises(MixedIdentity) as caught:
        comparable([first, other], {"engine", "protocol", "variance_ratio"})
    assert caught.value.fields == {"recipe.k.bits": ["3", "4"]}
