"""The workflow as a person meets it: every test runs a command, none runs Snakemake in pytest's process."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import embedded
from kvlab.core.paramfile import read_yaml
from kvlab.core.params import Params
from kvlab.core.recipe import CODECS
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.studies.mechanisms.plan import modules
from kvlab_pipeline.studies.processes import engines_of, units
from kvlab_pipeline.studies.settings import Settings, by_model

ROOT = Path(__file__).resolve().parents[2]
SNAKEMAKE = [sys.executable, "-m", "snakemake"]
REPORT = "results/gap/FINDINGS.md"


def run(*command, cwd=ROOT, timeout=300) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=timeout)


def counted(planned: subprocess.CompletedProcess) -> dict[str, int]:
    """The jobs that a dry run plans, by rule."""
    assert planned.returncode == 0, planned.stdout + planned.stderr
    table = planned.stdout.partition("Job stats:")[2]
    return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}


def script(name, *arguments, cwd=ROOT) -> subprocess.CompletedProcess:
    return run(sys.executable, ROOT / "workflow" / "scripts" / name, *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    """The workspace of the quick preset, with the embedded model."""
    folder = tmp_path_factory.mktemp("quick") / "workspace"
    made = script("workspace.py", "quick", "--at", folder)
    assert made.returncode == 0, made.stderr
    (folder / "params.yaml").write_text(embedded.text())
    return folder


@pytest.fixture
def workspace(quick, tmp_path) -> Path:
    """A copy of it: a folder where the workflow can run without touching the repository's results."""
    return shutil.copytree(quick, tmp_path / "workspace", symlinks=True)


@pytest.fixture(scope="module")
def rules(inspected) -> dict:
    """What each rule has."""
    return inspected("rules")["rules"]


@pytest.fixture(scope="module")
def affected(inspected) -> dict:
    """The stages that change with each parameter."""
    return inspected("affected")


@pytest.fixture(scope="module")
def stages() -> dict:
    return yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


@pytest.fixture(scope="module")
def params() -> Params:
    return embedded.settings()


def written(workspace: Path) -> set[str]:
    """Files under calib/ and results/, logs and benchmarks apart."""
    files = [path for part in ("calib", "results") for path in (workspace / part).rglob("*") if path.is_file()]
    names = {str(path.relative_to(workspace)) for path in files}
    return {name for name in names if not name.startswith(("results/logs", "results/benchmarks"))}


@pytest.mark.full  # `make lint` asks too
def test_dvc_yaml_agrees_with_the_rules():
    checked = script("dvc_sync.py", "--check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.full
def test_snakemake_lint_is_clean():
    linted = run(*SNAKEMAKE, "--lint")
    assert linted.returncode == 0, linted.stderr


@pytest.mark.full
def test_the_report_plans_every_job(workspace, params):
    counts = counted(run(*SNAKEMAKE, "-n", REPORT, cwd=workspace))
    captured, together = len(params.calibration.engines), set(plan.STUDIES) - {plan.LADDER}
    once = (
        "corpus_texts",
        "corpus_model",
        "asked_model",
        "archive_origin",
        "needles_model",
        "components_origin",
        "choice_layers",
        "gap_metrics",
        "gap_verdict",
    )
    expected = {
        **dict.fromkeys((*once, "gate_rows", "gate_report", "report_comparison", "report_lead"), 1),
        **{f"measure_{unit.replace('-', '_')}": 1 for unit in units(params) if unit != plan.LADDER},
        **dict.fromkeys(("capture_engine", "sigma_engine"), captured),
        **({"residual_engine": captured} if captured > 1 else {}),  # one alone has nothing to be compared with
        "codebooks_origin": len({origin for study in together for origin in plan.origins(params, study)}),
        **dict.fromkeys(("ladder_jobs", "ladder_facts"), 1),
    }
    assert counts == expected | {"total": sum(expected.values())}
    assert written(workspace) == set()


# The messages are tests/core/test_params.py's; one of them is enough to see that Snakemake says them.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codec": {"blok_size": 64}}, "unknown parameter 'codec.blok_size'; did you mean 'codec.block_size'?"),
        pytest.param(
            {"baseline": {"dtypes": ["bfloat16"]}},
            "baseline.dtypes is bfloat16; it must contain 'float32'",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"cells": {"klt": {"rung": "klr"}}},
            "cells.klt.rung: 'klr' is no rung; allowed: ",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"cells": {"k-only": {}, "twin": {"stream": "k"}}},
            "cells.k-only and cells.twin are the same cell (hf, in_forward)",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_wrong_parameter_is_one_line_and_writes_nothing(workspace, change, message):
    document = yaml.safe_load((workspace / "params.yaml").read_text())
    for key, value in change.items():
        document[key] = document[key] | value if isinstance(value, dict) else value
    (workspace / "params.yaml").write_text(yaml.safe_dump(document))
    refused = run(*SNAKEMAKE, REPORT, cwd=workspace)
    lines = [line for line in refused.stderr.splitlines() if "profile" not in line]
    assert refused.returncode == 2
    assert len(lines) == 1 and lines[0].startswith("error: params.yaml: ") and message in lines[0]
    assert written(workspace) == set()


@pytest.mark.full
def test_a_failed_job_names_its_log_and_the_reason(workspace):
    failed = run(*SNAKEMAKE, "corpus", "--config", "corpus={source: no/such/file.txt}", cwd=workspace)
    log = workspace / "results/logs/corpus/texts.log"
    reason = log.read_text().strip().splitlines()[-1]
    assert failed.returncode == 1
    assert "corpus_texts failed; results/logs/corpus/texts.log ends with\n    " + reason in failed.stderr
    assert "type the same command again" in failed.stderr
    assert written(workspace) == set()


@pytest.mark.full
def test_every_rule_that_runs_something_is_documented_logged_and_benchmarked(rules):
    working = {name: rule for name, rule in rules.items() if rule["runs"]}
    assert {"corpus_model", "capture_engine", "measure_float32", "gap_metrics", "report_lead"} <= working.keys()
    for name, rule in working.items():
        assert rule["docstring"], name
        assert len(rule["log"]) == 1 and rule["log"][0].startswith("results/logs/"), name
        assert rule["benchmark"].startswith("results/benchmarks/"), name
        assert rule["mem_mb"] and rule["runtime"], name
        assert {"code", "cfg"} <= set(rule["params"]), name


def test_what_measures_rows_again_is_given_what_it_reads(stages, params):
    """Of which code the rows are, too: without it no row of any run is measured again, and none certified."""
    given = Settings.partial(params.model_dump(mode="json", include={"model", *stages["gate"]["params"]}))
    assert modules(given) == modules(params)


@pytest.mark.nightly
def test_a_changed_parameter_reaches_exactly_the_stages_that_name_it(affected, stages):
    assert len(affected) > 50
    for leaf, found in affected.items():
        key = leaf.partition(".")[0]
        assert found == sorted(name for name, stage in stages.items() if key in stage["params"]), leaf


@pytest.mark.full
def test_a_job_depends_on_its_own_engine_only(rules):
    inputs = rules["capture_engine"]["inputs"]
    for engine, other in (("hf", "vllm"), ("vllm", "hf")):
        assert f"src/kvlab/engines/{engine}/engine.py" in inputs[engine]
        assert f"src/kvlab/engines/{other}/engine.py" not in inputs[engine]
    assert "src/kvlab/engines/vllm/follower.py" in inputs["vllm"]  # started as a program of its own
    on_hf = rules["measure_hf_mechanisms"]["inputs"]["hf"]
    assert "src/kvlab/engines/hf/engine.py" in on_hf and "src/kvlab/engines/vllm/engine.py" not in on_hf
    for dtype in ("float32", "bfloat16"):
        on_both = set(rules[f"measure_{dtype}"]["inputs"]["hf"])
        assert {"src/kvlab/engines/hf/engine.py", "src/kvlab/engines/vllm/engine.py"} <= on_both


def test_an_engine_is_started_once_a_dtype_and_once_more_for_the_mechanisms_on_hf(params):
    found = units(params)
    assert {name: engines_of(contents) for name, contents in found.items()} == {
        "float32": ["hf", "vllm"],
        "bfloat16": ["hf", "vllm"],
        "hf-mechanisms": ["hf"],
        "vllm-mechanisms": ["vllm"],
        "ladder": ["hf"],
    }
    jobs = [(study, job) for contents in found.values() for study, listed in contents.items() for job in listed]
    assert len(set(jobs)) == len(jobs)
    planned = {(study, job) for study in (*plan.STUDIES, plan.LADDER) for job in plan.job_names(params, study)}
    planned |= {("baseline", run) for run in plan.baseline_runs(params)}
    assert set(jobs) == planned | {("mechanisms", engine) for engine in params.engines}


@pytest.mark.full
def test_a_model_with_fewer_studies_brings_the_factorial_alone(workspace):
    document = yaml.safe_load((workspace / "params.yaml").read_text())
    document["models"].append({"path": "models/reference", "slug": "second", "studies": []})
    (workspace / "params.yaml").write_text(yaml.safe_dump(document | {"studies": ["ladder"]}))
    counts = counted(run(*SNAKEMAKE, "-n", REPORT, cwd=workspace))
    both, alone = ("corpus_model", "measure_float32", "gap_metrics"), ("gate_rows", "needles_model", "ladder_jobs")
    assert {counts[name] for name in both} == {2} and {counts[name] for name in alone} == {1}
    (workspace / "params.yaml").write_text(yaml.safe_dump(document | {"studies": ["cells"]}))
    refused = run(*SNAKEMAKE, "-n", REPORT, cwd=workspace)
    assert refused.returncode == 2 and "of model 'second' would share a process" in refused.stderr


@pytest.mark.full
def test_the_ladder_plans_its_own_jobs_and_reads_no_codebooks(workspace, params):
    counts = counted(run(*SNAKEMAKE, "-n", "ladder", cwd=workspace))
    assert counts["ladder_jobs"] == 1
    assert not {"codebooks", "measure_float32", "report"} & counts.keys()


@pytest.mark.full
def test_what_nobody_asks_for_is_neither_captured_nor_fitted(workspace):
    data = embedded.document()
    data["ladder"] |= {"codecs": ["klt", "hadamard"]}
    data["mechanisms"] |= {"codecs": ["klt"]}
    data["kvstore"]["restore"] = {"codecs": ["klt"]}
    (workspace / "params.yaml").write_text(yaml.safe_dump(data))
    planned = run(*SNAKEMAKE, "-n", "-p", REPORT, cwd=workspace)
    counts = counted(planned)
    assert "archive_origin" not in counts and counts["asked_model"] == 1
    assert "step asked --codecs  --out" in planned.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("rung", "fitted"), [("klt", {"cells": 2}), ("hadamard", {"cells": 1, "components": 2, "calibration": 2})]
)
def test_a_cell_of_another_origin_gets_components_of_that_origin_when_it_reads_them(workspace, rung, fitted):
    """The stage of calibration fits those of every engine that is captured, and so depends on no cell."""
    entry = {"rung": rung, "origin": "vllm", "engines": ["hf"]}
    data = embedded.document()
    data["cells"] |= {"elsewhere": entry}
    (workspace / "params.yaml").write_text(yaml.safe_dump(data))
    for target, number in fitted.items():
        assert counted(run(*SNAKEMAKE, "-n", target, cwd=workspace))["components_origin"] == number, target


@pytest.mark.nightly
def test_other_bits_reach_no_calibration(affected):
    for leaf in ("bits", "v_bits"):
        assert affected[leaf] == ["gate", "report", "studies"]


@pytest.mark.parametrize("study", [*plan.STUDIES, plan.LADDER])
def test_a_study_depends_on_the_codecs_that_it_loads_by_name(study, stages, params):
    if study == plan.CHOSEN:
        recipes = plan.mitigated_recipes(params)
    else:
        recipes = [r for job in plan.jobs(params, study).values() for cell in job for r in cell.recipes]
    streams = [stream for recipe in recipes for stream in (recipe.k, recipe.v)]
    names = {one.codec for stream in streams for one in (stream, getattr(stream, "of", stream))}
    for name in names | {"block"}:  # the canary's
        module = CODECS[name].codec.partition(":")[0]
        assert f"results/code/{module}.txt" in stages["studies"]["deps"], name


def test_an_unknown_preset_is_refused_with_the_nearest_name(tmp_path):
    refused = script("workspace.py", "quik", "--at", tmp_path / "workspace")
    assert refused.returncode == 2
    assert "did you mean 'quick'?" in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "workspace").exists()


@pytest.mark.parametrize("preset", [path.stem for path in sorted((ROOT / "workflow/presets").glob("*.yaml"))])
def test_a_preset_runs_apart_from_the_root(tmp_path, preset, params, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "workflow/scripts")
    workspace = importlib.import_module("workspace")  # whose command the fixture `quick` types
    monkeypatch.chdir(ROOT)
    workspace.make(tmp_path, workspace.preset_params(preset))
    own = next(iter(by_model(read_yaml(tmp_path / "params.yaml")).values()))  # `full` lists two models
    assert (own == params) == (preset == embedded.NAME)
    assert (own.windows.test > params.windows.test) == (preset == "confirm")
    assert (tmp_path / "src").samefile(ROOT / "src")
    assert not (tmp_path / "results").exists() and not (tmp_path / "calib").exists()
