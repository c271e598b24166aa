import json
import shutil
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from kvlab.core.errors import CodecNotActive, Fault, MissingResult, MixedIdentity, NonFinite, StaleResult
from kvlab.core.recipe import IDENTITY
from kvlab.core.records import read_job, read_json, read_tokens, write_job, write_json, write_table
from kvlab.output import format as fmt
from kvlab.stats.bootstrap import Bootstrap
from kvlab.stats.multiple import benjamini_hochberg
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.report.calibration import sigma_drift
from kvlab_pipeline.report.claims import derived, resolved, sentence
from kvlab_pipeline.report.contexts import calibration_context
from kvlab_pipeline.report.metrics import build
from kvlab_pipeline.report.summary import summary
from kvlab_pipeline.studies.baseline.numbers import agreement_entry
from kvlab_pipeline.studies.cells.chapter import one_claim
from kvlab_pipeline.studies.cells.numbers import cell_entries
from kvlab_pipeline.studies.factors.numbers import factors_entry, gap_entry
from kvlab_pipeline.studies.gather import comparable, gather
from pipeline.report.planted_identity import provenance
from pipeline.report.reading import estimates_in
from pipeline.report.synthetic import (
    CHOICE,
    Effects,
    Paths,
    small_params,
    with_table,
    write_results,
    write_sigma,
)
from refusals import refused

pytestmark = pytest.mark.full

DEFAULT = ("klt", "hf", "snapshot")
BOOT = Bootstrap(600, 0.95, 0)
ESTIMATE = {"value", "low", "high", "n_windows", "n_tokens", "method", "confidence", "n_documents"}


def run(params, paths):
    return build(params, paths.sources)


def agreed(params, folder, effects):
    """What is said of the engines' agreement where this is planted."""
    agreement, why = agreement_entry(params, collect(params, write_results(folder, params, effects)), BOOT)
    return agreement, why


def collect(params, paths):
    return gather(params, paths.baseline, paths.jobs, CHOICE)


@pytest.fixture(scope="module")
def params():
    return small_params()


@pytest.fixture(scope="module")
def factorial():
    """The same with the engine baseline and the factorial alone."""
    return small_params(studies=[])


@pytest.fixture(scope="module")
def whole(params, tmp_path_factory):
    return write_results(tmp_path_factory.mktemp("whole"), params)


@pytest.fixture(scope="module")
def metrics(params, whole):
    return run(params, whole)


@pytest.fixture(scope="module")
def few():
    """The same with fewer studies, for what is refused of any."""
    return small_params(studies=["cells", "layers", "noise"], noise={"sigmas": [0.03, 0.1]})


@pytest.fixture(scope="module")
def few_results(few, tmp_path_factory):
    return write_results(tmp_path_factory.mktemp("few"), few)


@pytest.fixture
def paths(few_results, tmp_path):
    """A copy of the planted results that a test may spoil."""
    origin = few_results.residual[0].parents[2]
    shutil.copytree(origin, tmp_path, dirs_exist_ok=True)

    def moved(path):
        return tmp_path / path.relative_to(origin)

    return Paths(
        baseline=[moved(path) for path in few_results.baseline],
        jobs=[moved(path) for path in few_results.jobs],
        codebooks=[moved(path) for path in few_results.codebooks],
        sigmas=[moved(path) for path in few_results.sigmas],
        residual=[moved(path) for path in few_results.residual],
        choice=None,
    )


def covers(estimate, truth):
    return estimate["low"] <= truth <= estimate["high"]


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
        *("identity", "settings", "sizes", "floor", "baseline", "baseline_peers", "agreement", "agreement_why", "gap"),
        *("gap_by_text", "factors", "cells"),
        *("layers", "additivity", "noise", "noise_slope", "closure", "structure", "residual", "mitigations"),
        *("ladder", "ladder_answers", "ladder_ablation", "ladder_state", "ladder_gain", "ladder_further"),
        "split",
        *("codebooks", "sigma", "sigma_drift", "schema_version"),
    }
    json.dumps(metrics, allow_nan=False)
    sizes = {"context": 64, "eval": 17, "windows": 12, "confidence": 0.95, "resamples": 600, "seed": 0}
    assert metrics["sizes"] == sizes
    assert metrics["identity"]["calibration_corpus_hash"] == metrics["identity"]["corpus_hash"] == "c" * 16
    assert set(metrics["identity"]["recipes"]) >= {cell["recipe_id"] for cell in metrics["cells"]}
    listed = [c for c in metrics["cells"] if c["study"] == "cells"]
    assert len(listed) == sum(len(c) for c in plan.jobs(params, "cells").values())
    assert {c["dtype"] for c in metrics["cells"]} == {params.gap.dtype}


def test_every_interval_is_an_interval(metrics):
    found = estimates_in(metrics)
    assert len(found) > 300
    for estimate in found:
        assert set(estimate) == ESTIMATE
        assert estimate["low"] <= estimate["value"] <= estimate["high"]


def test_gap_recovers_what_was_planted(metrics):
    gap, effects = metrics["gap"], Effects()
    assert gap["factors"] == ["engine", "protocol", "variance_ratio"]
    shared = {"dtype": "bfloat16", "origin": "hf"}
    assert gap["low"] == {"engine": "hf", "protocol": "snapshot", "variance_ratio": 1.0} | shared
    assert gap["high"] == {"engine": "vllm", "protocol": "in_forward", "variance_ratio": 0.95} | shared
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
    assert fmt.half_width(engine) < 0.15 * fmt.half_width(kl["high"])


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


def test_flips_are_counted_by_the_label(few, paths):
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
    planted = next(path for path in paths.jobs if path.parent.name == "cells")
    first = read_job(planted)[0].cells[0].cell_id
    cell = next(c for c in cell_entries(few, collect(few, paths), BOOT) if c["cell_id"] == first)
    assert cell["flips_to_wrong"]["value"] == pytest.approx(1 / 192)
    assert cell["flips_to_right"]["value"] == pytest.approx(1 / 192)
    assert cell["top1_agreement"]["value"] == pytest.approx(189 / 192)


def test_published_estimator_is_the_mean_of_window_ratios(metrics, whole):
    record, tokens = read_job(whole.jobs[0])
    rows = tokens.filter(pl.col("cell_id") == record.cells[0].cell_id)
    delta = (rows["nll_alt"] - rows["nll_ref"]).to_numpy().reshape(12, -1).mean(1)
    cell = next(c for c in metrics["cells"] if c["cell_id"] == record.cells[0].cell_id)
    assert cell["published_estimator"]["value"] == pytest.approx(np.mean(np.exp(delta) - 1))
    assert cell["ppl_ratio"]["value"] == pytest.approx(np.exp(delta.mean()))


def test_floor_and_baseline(metrics):
    floor = {(row["engine"], row["run"]): row["kl"]["value"] for row in metrics["floor"]}
    assert floor["hf", "identity_snapshot"] == pytest.approx(1e-4)
    assert floor["vllm", "rerun"] == pytest.approx(2.5e-5)
    rows = {row["run"]: row for row in metrics["baseline"]}
    assert list(rows) == [
        *("hf-float32-sdpa", "hf-float32-eager", "hf-bfloat16-sdpa", "hf-bfloat16-eager"),
        *("vllm-float32-default", "vllm-bfloat16-default"),
    ]
    assert rows["hf-bfloat16-eager"]["kl"]["value"] == pytest.approx(1e-3)
    assert rows["hf-float32-sdpa"]["top1_agreement"]["method"] == "exact"


def test_the_whole_factorial_sums_exactly_and_lists_every_pair(metrics):
    factors = metrics["factors"]
    assert factors["factors"] == ["engine", "protocol", "variance_ratio", "dtype", "origin"]
    kl = factors["measures"]["kl"]
    assert len(kl["corners"]) == 2**5 and len(kl["interactions"]) == 10
    shares = {part["factor"]: part["share"]["value"] for part in kl["parts"]}
    assert sum(shares.values()) == pytest.approx(kl["gap"]["value"], rel=1e-12)
    assert shares["origin"] == pytest.approx(0, abs=1e-12)  # planted: the calibration's origin does nothing


def test_claims_name_two_cells_and_their_windows(metrics):
    claims = derived(metrics)
    about = [claim["about"] for claim in claims]
    assert set(about) >= {"gap", "factors", "cells"}
    known = {c["cell_id"] for c in metrics["cells"]}
    for claim in claims:
        assert len(claim["compared"]) == 2 and all(claim["compared"]), claim["subject"]
        words = sentence(claim)
        assert f"{claim['effect']['n_windows']} windows" in words and " against " in words
        if claim["about"] in ("gap", "cells"):
            assert {side[0]["cell_id"] for side in claim["compared"]} <= known


def test_a_cell_is_held_against_the_studied_one(metrics):
    row = next(c for c in metrics["cells"] if (c["label"], c["engine"], c["protocol"]) == ("klt", "hf", "snapshot"))
    effects = Effects()
    assert row["difference"]["value"] == pytest.approx(effects.default_recipe - effects.base)
    assert covers(row["difference"], effects.default_recipe - effects.base) and row["difference"]["high"] < 0
    studied = [c for c in metrics["cells"] if c["study"] == "factors"]
    assert studied and all(c["difference"] is None for c in studied)


def test_sigma_and_codebooks(metrics):
    assert metrics["sigma_drift"]["trace_difference_max"] == pytest.approx(0.01)
    assert metrics["sigma"]["hf"]["off_diagonal_ratio_median"] == 3
    assert metrics["sigma"]["vllm"]["whitening_gain_db_median"] == 8.5
    assert metrics["sigma"]["vllm"]["whitening_gain_db_max"] == 11
    assert metrics["sigma"]["hf"]["round_trip_error_max"] == 1e-6
    assert metrics["sigma"]["hf"]["condition_max"] == 1001
    tables = [(t["origin"], t["stream"], t["placement"], t["stream_recipe_id"]) for t in metrics["codebooks"]]
    assert len(set(tables)) == len(tables) and {"hf", "vllm"} == {table[0] for table in tables}


def test_the_drift_of_sigma_has_an_interval_over_the_captured_windows(tmp_path):
    """Two captures whose traces differ by 1 % in the mean, and by window by a little more or less."""
    params = small_params(windows={"calib": 24})
    paths = [write_sigma(tmp_path, params, engine) for engine in ("hf", "vllm")]
    ratios = sigma_drift({path.stem: read_json(path) for path in paths}, Bootstrap(600, 0.95, 0))["trace_ratio"]
    assert list(ratios) == ["all_layers", *(f"layer_{layer}" for layer in range(6))]
    for found in ratios.values():
        assert found["value"] == pytest.approx(1.01, rel=1e-12)
        assert covers(found, 1.01) and 0 < fmt.half_width(found) < 0.002
        assert (found["n_windows"], found["n_tokens"]) == (24, 24 * params.windows.length)


def test_the_drift_is_printed_with_its_interval(metrics):
    printed = calibration_context(metrics)
    assert "trace ratio.all layers" in printed["drift"] and "trace ratio.layer 5" in printed["drift"]
    assert "whitening gain db median" in printed["sigma"] and "round trip error max" in printed["sigma"]


def test_summary_is_flat(metrics):
    found = summary(metrics)
    assert found["kl.share.variance_ratio"] == pytest.approx(0.06)
    assert found["engines_equivalent"] is True and found["engines_differ"] is False
    studied = [c["bits_per_value"] for c in metrics["cells"] if c["study"] == "factors" and c["role"] == "codec"]
    assert found["bits_per_value.min"] == min(studied) > min(c["bits_per_value"] for c in metrics["cells"])
    assert all(isinstance(value, float | bool) for value in found.values())


def test_changes_of_cells_are_corrected_for_one_another(metrics):
    """The planted changes stay; what is planted as no change is not resolved, though some interval may be clear."""
    held = [cell for cell in metrics["cells"] if cell["difference"]]
    assert len(held) > 10 and all(cell["q_value"] is None for cell in metrics["cells"] if not cell["difference"])
    assert [cell["q_value"] for cell in held] == pytest.approx(benjamini_hochberg([cell["p_value"] for cell in held]))
    (default,) = [cell for cell in held if (cell["label"], cell["engine"], cell["protocol"]) == DEFAULT]
    assert default["q_value"] < 0.05 and resolved(one_claim(default))
    lucky = default | {"q_value": 0.07}
    assert not resolved(one_claim(lucky))
    words = sentence(one_claim(lucky))
    assert "not resolved" in words and "its q-value among all changes is 0.070" in words and "needed" not in words


def test_windows_of_one_document_are_resampled_together(metrics, tmp_path):
    params = small_params(studies=["layers"])
    documents = tuple(window // 2 for window in range(params.windows.test))
    found = run(params, write_results(tmp_path, params, documents=documents))
    assert {one["n_documents"] for one in estimates_in(metrics["cells"])} == {None}
    whole, rerun = params.windows.test // 2, params.baseline.reruns // 2
    for part in ("gap", "factors", "baseline", "agreement", "layers"):
        assert {one["n_documents"] for one in estimates_in(found[part])} == {whole}, part
    for part in ("cells", "floor"):  # among them the plain rerun
        assert {one["n_documents"] for one in estimates_in(found[part])} == {whole, rerun}, part
    assert [row["document"] for row in found["gap"]["windows"] if not row["corner"]] == list(documents)
    share, alone = (one["gap"]["measures"]["kl"]["parts"][2]["share"] for one in (found, metrics))
    assert share["value"] == pytest.approx(alone["value"]) and share["low"] != alone["low"]


def test_jobs_that_tell_other_documents_are_not_mixed(factorial, tmp_path):
    paths = write_results(tmp_path, factorial, documents=tuple(range(factorial.windows.test)))
    job = json.loads(paths.jobs[0].read_text())
    paths.jobs[0].write_text(json.dumps(job | {"documents": {}}))
    with refused(MixedIdentity, None, "documents"):
        run(factorial, paths)


# ---------------------------------------------------------------------------------- agreement


def test_agreement_holds(metrics):
    agreement = metrics["agreement"]
    assert agreement["state"] == "equivalent" and agreement["windows_needed"] is None
    assert metrics["agreement_why"] == []
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
def test_agreement_fails(factorial, tmp_path, effects, words):
    agreement, why = agreed(factorial, tmp_path, effects)
    assert agreement["state"] == "differ" and agreement["windows_needed"] is None
    assert len(why) == 2 and words in why[0]


def test_agreement_fails_when_the_runs_are_further_apart_than_rounding_explains(factorial, tmp_path):
    agreement, why = agreed(factorial, tmp_path, Effects(cross_codec=1e-3, rounding=1e-6))
    assert agreement["state"] == "differ" and "rounding error" in why[0]


@pytest.mark.parametrize("off", [0.02, -0.02])
def test_agreement_is_open_while_the_interval_touches_the_bound(factorial, tmp_path, off):
    agreement, why = agreed(factorial, tmp_path, Effects(codec_disagreement=off))
    relative = agreement["codec"]["snapshot"]["relative_difference"]
    assert relative["low"] < off < relative["high"]
    assert agreement["state"] == "open" and len(why) == 2 and "2%" in why[0]
    needed = agreement["windows_needed"]
    assert needed is None or needed > fmt.OUT_OF_REACH  # the value lies on the bound, but for the last bits


def test_few_scattered_windows_leave_the_agreement_open_and_say_how_many_would_do(factorial, tmp_path):
    agreement, _ = agreed(factorial, tmp_path, Effects(float32_jitter=0.6))
    assert agreement["state"] == "open"
    assert agreement["windows_needed"] > factorial.windows.test


@pytest.mark.parametrize(
    "effects", [Effects(cross_codec=3e-4, rounding=3e-5), Effects(cross_codec=1e-3, rounding=1e-4)]
)
def test_coded_runs_on_a_bound_of_rounding_are_open(factorial, tmp_path, effects):
    """KL between the runs is over the band of the codec's own, and ten times the jitter in the mean."""
    agreement, why = agreed(factorial, tmp_path, effects)
    assert agreement["state"] == "open" and "rounding error" in why[0]


# ------------------------------------------------------------------------------ smaller studies


@pytest.mark.parametrize(
    ("changes", "factors"),
    [
        ({"engines": ["hf"]}, ["protocol", "variance_ratio"]),
        ({"protocols": ["in_forward"]}, ["engine", "variance_ratio"]),
        ({"engines": ["hf"], "protocols": ["snapshot"]}, ["variance_ratio"]),
        ({"gap": {"variance_ratios": [1.0, 1.0]}}, ["engine", "protocol"]),
    ],
)
def test_a_factor_with_one_level_is_dropped(tmp_path, changes, factors):
    params = small_params(studies=[], cells={"eager": None}, **changes)
    metrics = run(params, write_results(tmp_path, params))
    assert metrics["gap"]["factors"] == factors
    kl = metrics["gap"]["measures"]["kl"]
    assert len(kl["corners"]) == 2 ** len(factors)
    assert set(kl["corners"][0]) == {"engine", "protocol", "variance_ratio", "dtype", "origin", "value"}
    total = sum(part["share"]["value"] for part in kl["parts"])
    assert total == pytest.approx(kl["gap"]["value"], rel=1e-12)
    if len(params.engines) == 1:
        assert metrics["agreement"] is None and params.engines[0] in metrics["agreement_why"][0]
        assert metrics["sigma_drift"] is None


def test_fewer_windows_in_the_layer_and_noise_studies(tmp_path):
    params = small_params(studies=["layers", "noise"], layers={"windows": 8}, noise={"windows": 9})
    metrics = run(params, write_results(tmp_path, params))
    assert metrics["layers"][0]["kl"]["n_windows"] == metrics["additivity"][0]["ratio"]["n_windows"] == 8
    assert metrics["noise"][0]["kl"]["n_windows"] == metrics["noise_slope"][0]["slope"]["n_windows"] == 9


@pytest.mark.parametrize(("baseline", "compared"), [(12, 5), (4, 4)])
def test_fewer_windows_in_other_dtypes_than_that_of_the_gap(tmp_path, baseline, compared):
    fewer = {"gap": {"other_windows": 5}, "baseline": {"windows": baseline}, "noise": {"windows": 4}}
    params = small_params(studies=[], **fewer)
    metrics = run(params, write_results(tmp_path, params))
    planned = {(cell.dtype, cell.windows) for cell in plan.study_cells(params, "factors", "hf") if cell.layers}
    assert planned == {("bfloat16", 12), ("float32", 5)}
    assert metrics["gap"]["measures"]["kl"]["gap"]["n_windows"] == 12
    assert metrics["factors"]["measures"]["kl"]["gap"]["n_windows"] == 5
    assert {one["kl"]["n_windows"] for one in metrics["baseline"]} == {baseline}
    agreement = metrics["agreement"]
    assert {one["n_windows"] for one in agreement["identity"].values()} == {compared}
    assert {one["cross_kl"]["n_windows"] for one in agreement["codec"].values()} == {compared}
    assert {one["relative_difference"]["n_windows"] for one in agreement["codec"].values()} == {5}


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "other"}, "model: other | reference"),
        ({"corpus_hash": "other"}, "corpus_hash"),
        ({"calibration": {"hf": "other"}}, "calibration.hf"),
        ({"versions": {"kvlab": "0.2.0", "python": "3.11"}}, "versions.kvlab: 0.1.0 | 0.2.0"),
        ({"versions": {"kvlab": "0.1.0"}}, "versions: kvlab | kvlab, python"),
    ],
)
def test_mixed_identity_is_refused(few, paths, changes, words):
    edit_job(paths, "noise", lambda r, t: (r.model_copy(update={"provenance": provenance(**changes)}), t), index=1)
    with pytest.raises(MixedIdentity) as caught:
        collect(few, paths)
    assert words in str(caught.value)


def test_results_of_another_model_are_refused(few, few_results):
    with refused(MixedIdentity, None, "model: another | reference"):
        collect(few.model_copy(update={"model": few.model.model_copy(update={"slug": "another"})}), few_results)


def test_mixed_identity_of_a_baseline_run_is_refused(few, paths):
    record = read_json(paths.baseline[1])
    record["provenance"]["model_hash"] = "other"
    write_json(paths.baseline[1], record)
    with refused(MixedIdentity, None, "model_hash"):
        collect(few, paths)


def test_a_job_without_calibration_is_no_mixture(few, paths):
    without = provenance(calibration={})
    edit_job(paths, "noise", lambda r, t: (r.model_copy(update={"provenance": without}), t))
    assert collect(few, paths).provenance.calibration["hf"] == "a" * 16


def test_other_window_sizes_are_refused(few, paths):
    other = few.model_copy(update={"windows": few.windows.model_copy(update={"eval": 33})})
    with refused(MixedIdentity, None, "eval: 17 | 33"):
        collect(other, paths)


def test_a_missing_job_is_named(few, paths):
    gone = paths.jobs.pop(3)
    study = gone.parent.name
    with refused(MissingResult, "missing-result.cell", f"`kvlab step measure --study {study} --job {gone.stem}`"):
        collect(few, paths)


def test_a_missing_baseline_run_is_named(few, paths):
    paths.baseline.pop()
    with refused(MissingResult, "missing-result.run", "vllm-bfloat16-default"):
        collect(few, paths)


def test_a_missing_cell_is_named(few, paths):
    def drop(record, tokens):
        gone = record.cells[0].cell_id
        kept = record.model_copy(update={"cells": record.cells[1:]})
        return kept, tokens.filter(pl.col("cell_id") != gone)

    edit_job(paths, "cells", drop)
    with refused(MissingResult, "missing-result.cell", "'k-only'"):
        collect(few, paths)


def test_a_cell_of_other_parameters_is_refused(paths):
    with refused(StaleResult, "stale.not-planned"):
        collect(small_params(bits=4), paths)


def test_a_cell_that_is_there_twice_is_refused(few, paths):
    paths.jobs.append(paths.jobs[0])
    with refused(StaleResult, "stale.twice", paths.jobs[0]):
        collect(few, paths)


@pytest.mark.parametrize("field", ["cell_id", "recipe_id"])
def test_an_id_that_is_not_that_of_its_content_is_refused(few, paths, field):
    def forge(record, tokens):
        first = record.cells[0]
        forged = edit_cells(record, lambda c: c.model_copy(update={field: "f" * 12}), lambda c: c is first)
        column = pl.col("cell_id").replace(first.cell_id, forged.cells[0].cell_id)
        return forged, tokens.with_columns(column)

    edit_job(paths, "cells", forge)
    with refused(StaleResult, "stale.forged-id", f"{field} {'f' * 12}"):
        collect(few, paths)


def test_rows_without_a_record_are_refused(few, paths):
    edit_job(paths, "cells", lambda r, t: (r.model_copy(update={"cells": r.cells[1:]}), t))
    with refused(StaleResult, "stale.other-cells"):
        collect(few, paths)


@pytest.mark.parametrize("column", ["kl", "nll_alt", "p_ref_max"])
def test_non_finite_rows_are_refused(few, paths, column):
    path = paths.jobs[0].with_suffix(".parquet")
    table = read_tokens(path)
    write_table(
        path, table.with_columns(pl.when(pl.col("position") == 70).then(float("nan")).otherwise(column).alias(column))
    )
    with refused(NonFinite, None, column):
        collect(few, paths)


def test_negative_kl_is_refused(few, paths):
    edit_job(paths, "cells", lambda r, t: (r, t.with_columns(kl=-pl.col("kl"))))
    with refused(Fault, "fault.negative-kl"):
        collect(few, paths)


@pytest.mark.parametrize("fires", [-1, 1])
def test_a_codec_that_did_not_fire_as_planned_is_refused(few, paths, fires):
    def misfire(cell):
        coding = cell.coding.model_copy(update={"fires": cell.coding.fires + fires})
        return cell.model_copy(update={"coding": coding})

    edit_job(paths, "factors", lambda r, t: (edit_cells(r, misfire, lambda c: c.cell.label == "kv"), t))
    with refused(CodecNotActive, "not-active.fires"):
        collect(few, paths)


def test_a_codec_that_was_never_due_is_refused(few, paths):
    def idle(cell):
        return cell.model_copy(update={"coding": cell.coding.model_copy(update={"fires": 0, "expected_fires": 0})})

    edit_job(paths, "noise", lambda r, t: (edit_cells(r, idle, lambda c: c.cell.recipe != IDENTITY), t))
    with refused(CodecNotActive, "not-active.idle"):
        collect(few, paths)


def test_a_canary_without_effect_is_refused(few, tmp_path):
    with refused(CodecNotActive, "not-active.canary"):
        collect(few, write_results(tmp_path, few, Effects(canary=0.99e-4)))


def test_other_windows_are_refused(few, paths):
    edit_job(paths, "cells", lambda r, t: (r, t.with_columns(window=pl.col("window") + 1)))
    with refused(MixedIdentity, None, "windows: cell ", " 1..12", "expected: 0..11"):
        collect(few, paths)


def test_other_positions_are_refused(few, paths):
    edit_job(paths, "cells", lambda r, t: (r, t.filter(pl.col("position") != 70)))
    with refused(MixedIdentity, None, "positions"):
        collect(few, paths)


def test_other_labels_are_refused(few, paths):
    place = (pl.col("window") == 3) & (pl.col("position") == 70)
    label = pl.when(place).then(pl.col("label") + 1).otherwise("label").alias("label")
    edit_job(paths, "layers", lambda r, t: (r, t.with_columns(label)))
    with refused(MixedIdentity, None, "label at window 3 position 70"):
        collect(few, paths)


def test_baseline_without_agreement_cells_is_named(few, paths):
    path = next(path for path in paths.baseline if path.stem == "vllm-float32-default")
    record, table = read_json(path), read_tokens(path.with_suffix(".parquet"))
    record["cells"] = [cell for cell in record["cells"] if cell["what"] == "plain"]
    write_json(path, record)
    kept = pl.col("cell_id") == record["cells"][0]["cell_id"]
    with_table(path, table.filter(kept))
    with refused(MissingResult, "missing-result.comparison", "'identity'"):
        run(few, paths)


def test_calibration_of_another_model_is_refused(few, paths):
    for path in (paths.codebooks[0], paths.sigmas[1]):
        data = read_json(path)
        write_json(path, data | {"model_hash": "other"})
        with refused(MixedIdentity, None, "model_hash: ", "other"):
            run(few, paths)
        write_json(path, data)


def test_codebooks_without_a_used_table_are_refused(few, paths):
    path = next(path for path in paths.codebooks if path.name == "hf.json")
    data = read_json(path)
    write_json(path, data | {"tables": [table for table in data["tables"] if table["placement"] == "pre_rope"]})
    with refused(StaleResult, "stale.no-table", "hf/k/post_rope/"):
        run(few, paths)


def test_a_table_that_stands_in_two_codebooks_is_refused(few, paths):
    paths.codebooks.append(paths.codebooks[0])
    with refused(StaleResult, "stale.table-twice"):
        run(few, paths)


def refitted(record, kind):
    """A record whose pieces of one kind were other numbers."""

    def change(cell):
        made = {name: "0" * 12 if name.startswith(kind) else one for name, one in cell.fitted.items()}
        return cell.model_copy(update={"fitted": made})

    return edit_cells(record, change)


def test_cells_measured_with_tables_fitted_on_other_layers_are_refused(few, paths):
    """Other boundary layers move every study but this one, whose cells keep their ids and had the old tables."""
    edit_job(paths, "layers", lambda r, t: (refitted(r, "table"), t))
    place = ("calibration on hf, table/", "/pre_rope/", "0" * 12, "(layers")
    with refused(MixedIdentity, None, *place, "of job layers/", "of job cells/"):
        collect(few, paths)


@pytest.mark.parametrize("kind", ["table", "whitener"])
def test_two_jobs_of_a_study_with_other_calibrations_are_refused(few, paths, kind):
    """As measured with different --codebooks, or with another Sigma_q under the same name."""
    edit_job(paths, "factors", lambda r, t: (refitted(r, kind), t), index=1)
    with refused(MixedIdentity, None, "calibration on hf, ", f"{kind}/", "0" * 12, "of job factors/"):
        collect(few, paths)


def test_a_record_that_does_not_name_its_calibration_is_refused(few, paths):
    edit_job(paths, "factors", lambda r, t: (edit_cells(r, lambda c: c.model_copy(update={"fitted": {}})), t))
    with refused(StaleResult, "stale.other-calibration", "`kvlab step measure --study factors"):
        collect(few, paths)


def test_another_calibration_does_not_pass_the_second_door(few, paths):
    """Also when it came in behind gather's back."""
    first, *others = collect(few, paths).select("factors", "codec", dtype="bfloat16", origin="hf")
    comparable([first, *others], {"engine", "protocol", "variance_ratio"})
    other = replace(first, record=refitted_cell(first.record))
    with refused(MixedIdentity, None, "calibration on hf, "):
        comparable([other, *others], {"engine", "protocol", "variance_ratio"})


def refitted_cell(record):
    return record.model_copy(update={"fitted": dict.fromkeys(record.fitted, "0" * 12)})


@pytest.mark.parametrize(
    ("change", "error", "code", "data"),
    [
        ({"sigma_hash": "other"}, MixedIdentity, None, ("Sigma_q of hf: ", "a" * 16, "other")),
        ({"layers": [0, 1]}, StaleResult, "stale.other-layers", ([0, 1],)),
    ],
)
def test_codebooks_of_another_calibration_are_refused(few, paths, change, error, code, data):
    path = next(path for path in paths.codebooks if path.name == "hf.json")
    write_json(path, read_json(path) | change)
    with refused(error, code, *data):
        run(few, paths)


def test_a_table_that_no_cell_was_measured_with_is_refused(few, paths):
    for path in paths.codebooks:
        data = read_json(path)
        for table in data["tables"]:
            table["centroids"][0] -= 1.0
        write_json(path, data)
    with refused(StaleResult, "stale.other-table"):
        run(few, paths)


def test_a_sigma_of_another_calibration_is_refused(few, paths):
    data = read_json(paths.sigmas[0])
    for change, named in (({"corpus_hash": "other"}, "corpus_hash: "), ({"file_hash": "other"}, "Sigma_q of hf: ")):
        write_json(paths.sigmas[0], data | change)
        with refused(MixedIdentity, None, named, "other"):
            run(few, paths)
    write_json(paths.sigmas[0], data)
    paths.sigmas[0].with_suffix(".safetensors").write_bytes(b"another")
    with refused(StaleResult, "stale.other-sigma", "hf.safetensors"):
        run(few, paths)


def test_every_comparison_passes_the_door(few, paths):
    """Cells changed behind gather's back are still caught by the functions that compare them."""
    results, boot = collect(few, paths), Bootstrap(200, 0.95, 0)

    def with_other_device(study, dtype, role):
        cells = [
            replace(m, provenance=provenance(device="other"))
            if (m.cell.study, m.cell.dtype, m.cell.engine, m.role) == (study, dtype, "vllm", role)
            else m
            for m in results.cells
        ]
        return replace(results, cells=tuple(cells))

    for study, dtype, role, compare in (
        ("factors", "bfloat16", "codec", gap_entry),
        ("factors", "float32", "codec", agreement_entry),
        ("factors", "float32", "codec", factors_entry),
        ("cells", "bfloat16", "codec", cell_entries),
    ):
        with refused(MixedIdentity, None, "device: cpu | other"):
            compare(few, with_other_device(study, dtype, role), boot)


def test_recipes_that_differ_outside_the_factor_refuse_to_be_compared(few, paths):
    results = collect(few, paths)
    corners = results.select("factors", "codec", dtype="bfloat16", origin="hf")
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
