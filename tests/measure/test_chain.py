"""From windows to verdicts on both engines, in one process: the chain that the rules run step by step."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from kvlab.core.errors import CodecNotActive, UnknownName
from kvlab.core.paramfile import overlay
from kvlab.core.records import read_job, read_tokens
from kvlab.engines import registry
from kvlab_pipeline.jobs.measure import measure
from kvlab_pipeline.jobs.plan import LADDER, STUDIES, baseline_runs, job_names, jobs
from kvlab_pipeline.report import findings
from kvlab_pipeline.report.metrics import build
from kvlab_pipeline.report.verdict import judge
from kvlab_pipeline.studies.baseline.measure import baseline
from kvlab_pipeline.studies.cells.params import CELLS
from kvlab_pipeline.studies.chapter import Sources
from kvlab_pipeline.studies.ladder.facts import facts
from kvlab_pipeline.studies.mitigations.plan import read_choice
from kvlab_pipeline.studies.mitigations.search import choose
from kvlab_pipeline.studies.residual.measure import residual
from kvlab_pipeline.studies.settings import Settings
from refusals import refused

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@pytest.fixture(scope="module")
def params(tiny_params) -> Settings:
    """Everything in float32, so that the session's engines serve every job."""
    left_out = {"eager"} | (CELLS.keys() - tiny_params.cells.keys())  # the session's engine is the sdpa one
    changes = {
        "gap": {"dtype": "float32", "dtypes": ["float32"]},
        "cells": dict.fromkeys(left_out),
        "mitigations": {"budget": 30.0, "klt_bits": 8.0},
        "baseline": {"dtypes": ["float32"], "hf_attention": ["sdpa"]},
    }
    return Settings.complete(overlay(tiny_params.model_dump(mode="json"), changes))


@pytest.fixture(scope="module")
def results(params, tiny_windows, tiny_fitted, tiny_calibration, hf_engine, vllm_engine, tmp_path_factory):
    """Paths of every baseline run and job, of the choice and of the residuals, measured for real.

    The ladder reads no codebooks, and is given none.
    """
    folder = tmp_path_factory.mktemp("results")
    engines = {"hf": hf_engine, "vllm": vllm_engine}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "start", lambda name, *_, **__: engines[name])
        for engine in engines.values():
            patch.setattr(engine, "close", lambda: None)
        runs = [folder / "baseline" / f"{run}.parquet" for run in baseline_runs(params)]
        for path in runs:
            baseline(params, path.stem, tiny_windows, tiny_fitted, path)
        choose(params, tiny_windows, {"hf": tiny_fitted}, folder / "choice.json")
        choice = read_choice(folder / "choice.json").choice
        done = {}
        for study in STUDIES:
            fitted = replace(tiny_fitted, codebooks=None) if study == LADDER else tiny_fitted
            for job in job_names(params, study):
                done[study, job] = folder / study / f"{job}.parquet"
                measure(params, study, job, tiny_windows, {"hf": fitted}, done[study, job], choice)
    facts(params, tiny_windows, tiny_fitted, folder / "facts.json")
    residual(params, tiny_calibration["capture"], tiny_fitted, folder / "residual" / "hf.parquet")
    return runs, done, folder


@pytest.fixture(scope="module")
def metrics(params, results, tiny_calibration, tiny_fitted) -> dict:
    runs, done, folder = results
    sources = Sources(
        baseline=[path.with_suffix(".json") for path in runs],
        jobs=[path.with_suffix(".json") for path in done.values()],
        codebooks=[tiny_fitted.codebooks],
        sigmas=[tiny_calibration["sigma"].with_suffix(".json")],
        residual=[folder / "residual" / "hf.json"],
        choice=folder / "choice.json",
        ladder=folder / "facts.json",
    )
    return build(params, sources)


def test_the_engines_agree_with_the_truth(metrics):
    by_run = {row["run"]: row["kl"]["value"] for row in metrics["baseline"]}
    assert by_run["hf-float32-sdpa"] == pytest.approx(0, abs=1e-12)
    assert by_run["vllm-float32-default"] < 1e-6
    assert all(kl["value"] < 1e-6 for kl in metrics["agreement"]["identity"].values())
    assert metrics["agreement"]["state"] != "differ", metrics["agreement"]["why"]  # so few windows may leave it open


def test_identity_and_rerun_cost_nothing(metrics):
    for cell in metrics["cells"]:
        if cell["role"] != "codec":
            assert cell["kl"]["value"] < 1e-9


def test_fewer_kept_directions_cost_more(metrics):
    for protocol in ("in_forward", "snapshot"):
        by_ratio = {
            cell["variance_ratio"]: cell["kl"]["value"]
            for cell in metrics["cells"]
            if (cell["study"], cell["engine"], cell["protocol"], cell["role"]) == ("factors", "hf", protocol, "codec")
        }
        assert by_ratio[0.95] > by_ratio[1.0] > 0


def test_the_parts_sum_to_the_gap(metrics):
    for measure_ in metrics["gap"]["measures"].values():
        parts = sum(part["share"]["value"] for part in measure_["parts"])
        assert parts == pytest.approx(measure_["gap"]["value"], abs=1e-12)
    assert metrics["gap"]["factors"] == ["engine", "protocol", "variance_ratio"]


def test_noise_is_quadratic_on_both_engines(metrics):
    for row in metrics["noise_slope"]:
        assert row["slope"]["value"] == pytest.approx(2, abs=0.2)


def test_every_cell_scored_the_same_labels(results):
    done = results[1]
    keys = ["window", "position", "label"]
    scored = {}
    for path in done.values():
        record, tokens = read_job(path)
        for cell in record.cells:
            rows = tokens.filter(pl.col("cell_id") == cell.cell_id).select(keys).rows()
            scored.setdefault((cell.cell.text, cell.cell.windows), set()).add(tuple(sorted(rows)))
    assert {place: len(labels) for place, labels in scored.items()} == {("test", 4): 1, ("test", 3): 1, ("other", 3): 1}


def test_measuring_again_gives_the_same_bytes(
    params, results, tiny_windows, tiny_fitted, hf_engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(registry, "start", lambda *_, **__: hf_engine)
    out = tmp_path / "hf-float32-0.parquet"
    measure(params, "layers", "hf-float32-0", tiny_windows, {"hf": tiny_fitted}, out)
    first = results[1]["layers", "hf-float32-0"]
    assert out.read_bytes() == first.read_bytes()
    assert out.with_suffix(".json").read_bytes() == first.with_suffix(".json").read_bytes()


def test_the_ladder_scores_both_texts_without_codebooks(params, results):
    """Every rung on 64 tokens: all fire, and klt at 4 bits does less harm than at 2 on either text."""
    kls = {}
    for job in jobs(params, LADDER):
        record, tokens = read_job(results[1][LADDER, job])
        means = dict(tokens.group_by("cell_id").agg(pl.col("kl").mean()).iter_rows())
        plain = [entry for entry in record.cells if entry.cell.protocol == "snapshot"]
        assert len(means) == len(record.cells)
        kls |= {(entry.cell.text, entry.cell.label): means[entry.cell_id] for entry in plain}
    planned = [cell for job in jobs(params, LADDER).values() for cell in job if cell.protocol == "snapshot"]
    assert len(kls) == len({cell.cell_id for cell in planned})
    for text in ("test", "other"):
        assert kls[text, "klt 4"] < kls[text, "klt 2"]
    assert kls["test", "klt 2"] != kls["other", "klt 2"]


def test_the_report_is_written_from_it(params, metrics, tmp_path):
    verdict = judge(params, metrics)
    findings.write(params, metrics, verdict, tmp_path / "FINDINGS.md", tmp_path / "report.html")
    text = (tmp_path / "FINDINGS.md").read_text()
    assert "## What the gap decomposes into" in text and "Withheld" not in text
    assert "not measured" not in text.lower()
    assert "What the gap decomposes into</h2>" in (tmp_path / "report.html").read_text()
    assert {p.suffix for p in (tmp_path / "figures").iterdir()} == {".svg", ".csv"}


def test_a_baseline_whose_codec_stays_idle_is_not_written(
    params, tiny_windows, tiny_fitted, hf_engine, vllm_engine, tmp_path, monkeypatch
):
    """The engines would agree perfectly if neither ran the codec."""
    engines = {"hf": hf_engine, "vllm": vllm_engine}
    monkeypatch.setattr(registry, "start", lambda name, *_, **__: engines[name])
    monkeypatch.setattr(vllm_engine, "close", lambda: None)
    score = type(vllm_engine).score
    monkeypatch.setattr(type(vllm_engine), "score", lambda self, ids, first, *_: score(self, ids, first))
    with refused(CodecNotActive, "not-active.fires", "fired 0 times"):
        baseline(
            params,
            "vllm-float32-default",
            tiny_windows,
            tiny_fitted,
            tmp_path / "x.parquet",
        )
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_run_names_the_nearest(params, tiny_windows, tmp_path):
    with refused(UnknownName, None, "'hf-float32-eger'", "'hf-float32-sdpa'"):
        baseline(params, "hf-float32-eger", tiny_windows, None, tmp_path / "x.parquet")


def test_baseline_tables_hold_the_schema(results):
    for path in results[0]:
        assert len(read_tokens(path)) > 0
