"""The lines that a person types, as they are typed, on the real rules; only the measuring is stood in.

Each test says which programs really ran: not what Snakemake or DVC print, but a trace that they write themselves.
"""

from __future__ import annotations

import json
import re
import sys

import pytest
import yaml

REPORT = "results/gap/FINDINGS.md"
SIGMA = "calib/sigma/reference/hf.safetensors"
CORPUS, CAPTURE = "calib/corpus/reference/windows.safetensors", "calib/capture/reference/hf.safetensors"
FITTED = [
    "archive calib/archive/reference/hf.safetensors",
    f"capture {CAPTURE}",
    "components calib/components/reference/hf.safetensors",
    f"sigma {SIGMA}",
]
TEXTS = "texts calib/corpus/texts.parquet"
TO_SIGMA = [
    "asked calib/asked/reference.json",
    f"capture {CAPTURE}",
    f"corpus {CORPUS}",
    f"sigma {SIGMA}",
    TEXTS,
]
STUDIES = ("restore", "policy", "bitplanes", "placement")  # of the KV store
OUTSIDE_THE_REPORT = [
    "planted results/planted",
    "capacity results/capacity/reference",
    "service results/service/reference",
    "ranks results/ranks/reference/CLUSTER.md",
    "micro results/micro/BENCH.md",
    "weights models/smollm2-135m/model.safetensors",  # of a model that params.yaml does not name
    *(f"{study} results/kvstore/{study}/reference.json" for study in STUDIES),
    *(f"page results/kvstore/{study.upper()}.md" for study in STUDIES),
    *("tradeoffs results/tradeoffs/reference.json", "page results/tradeoffs/REPORT.md"),
]
TRUST = "gate_trust results/gate/TRUST.md"  # the report does not read it; for DVC it belongs to the stage `gate`


@pytest.mark.full
def test_dvc_repro_makes_everything_once(reproduced):
    ran = reproduced.ran(forget=False)
    assert len(ran) == len(set(ran))
    verbs = {line.partition(" ")[0] for line in ran}
    assert {"texts", "corpus", "capture", "codebooks", "choose", "jobs", "metrics", "verdict", "report"} <= verbs
    assert {*TO_SIGMA, *OUTSIDE_THE_REPORT} <= set(ran)


@pytest.mark.nightly
def test_snakemake_makes_a_file_and_then_the_report_from_it_and_nothing_twice(unrun, reproduced, tmp_path):
    lab = unrun.copy(tmp_path)
    lab.run("snakemake", SIGMA)
    assert lab.ran() == TO_SIGMA
    lab.run("snakemake", REPORT)
    assert sorted(lab.ran() + TO_SIGMA + OUTSIDE_THE_REPORT + [TRUST]) == reproduced.ran(forget=False)
    made = lab.files()
    assert REPORT in made and made.items() <= reproduced.files().items()
    lab.run("snakemake", REPORT)
    lab.run("snakemake", "--report", "report.html")
    assert lab.ran() == []
    assert REPORT in (lab.root / "report.html").read_text()


@pytest.mark.full
def test_a_second_dvc_repro_runs_nothing_and_what_was_deleted_comes_back(lab, reproduced):
    lab.run("dvc", "repro")
    assert lab.files() == reproduced.files()
    lab.forget()
    lab.run("dvc", "repro")
    assert lab.files() == reproduced.files()
    assert lab.ran() == []


@pytest.mark.nightly
def test_dvc_repro_of_a_stage_runs_what_it_needs_and_no_more(lab, reproduced):
    lab.change("params.yaml", "ridge: 0.001", "ridge: 0.002")
    lab.run("dvc", "repro", "calibration")
    assert lab.ran() == FITTED
    before, after = reproduced.files(), lab.files()
    assert before[SIGMA] != after[SIGMA] and before[REPORT] == after[REPORT]


@pytest.mark.nightly
def test_the_stage_of_the_report_makes_what_snakemake_makes_for_it(lab, reproduced):
    """Bare `dvc repro` makes what is outside of it, too."""
    lab.change("params.yaml", "ridge: 0.001", "ridge: 0.002")
    lab.run("dvc", "repro", "report")
    ran = lab.ran()
    assert "sigma " + SIGMA in ran and any(line.startswith("report ") for line in ran)
    assert not set(OUTSIDE_THE_REPORT) & set(ran)


def dry(lab, *command) -> list[str]:
    """The stages that a dry run of DVC names, as `make setup` puts it in place."""
    said = lab.run(sys.executable, "workflow/scripts/dvc_dry.py", *command, "--dry")
    return re.findall(r"^Running stage '(\w+)'", said, re.MULTILINE)


@pytest.mark.nightly
def test_a_dry_run_in_a_fresh_clone_names_every_stage_and_makes_nothing(unrun, tmp_path):
    lab = unrun.copy(tmp_path)
    every = set(yaml.safe_load((lab.root / "dvc.yaml").read_text())["stages"])
    assert every - set(dry(lab, "repro")) == set()
    assert every - set(dry(lab, "exp", "run", "-S", "bits=4")) == set()
    assert set(dry(lab, "repro", "calibration")) == {"code", "data", "calibration"}
    assert lab.ran() == [] and lab.files() == {} and lab.run("git", "status", "--short") == ""


@pytest.mark.nightly
def test_a_dry_run_beside_results_names_what_would_run(lab):
    assert dry(lab, "repro") == []
    for more in ((), ("--allow-missing",)):
        assert dry(lab, "exp", "run", *more, "-S", "bits=4") == ["studies", "gate", "report"]
    assert lab.ran() == [] and lab.run("git", "status", "--short") == ""


@pytest.mark.nightly
def test_dvc_shows_metrics_and_plots(lab):
    assert json.loads(lab.run("dvc", "metrics", "show", "--json"))
    shown = lab.run("dvc", "plots", "show", "--out", "plots")
    assert "index.html" in shown and (lab.root / "plots/index.html").is_file()
