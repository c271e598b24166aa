"""Traps of Snakemake under DVC that show only when the pipeline runs (the others: ../test_traps.py)."""

from __future__ import annotations

import pytest
import yaml


@pytest.mark.full
def test_a_run_leaves_nothing_that_dvc_does_not_know(reproduced):
    """Undeclared scratch outlives the removal of a stage's outs, and was taken for a result of other parameters."""
    made = [
        out
        for stage in yaml.safe_load((reproduced.root / "dvc.yaml").read_text())["stages"].values()
        for kind in ("outs", "metrics", "plots")
        for out in stage.get(kind, [])
    ]
    unknown = [
        path for path in reproduced.files() if not any(path == out or path.startswith(f"{out}/") for out in made)
    ]
    assert unknown == []


@pytest.mark.nightly
def test_a_failed_stage_is_not_recorded_and_the_same_command_goes_on(lab, reproduced):
    """Also what its other jobs made is not: DVC removes it before the stage runs again."""
    lab.change("params.yaml", "title: ", "title: Once more, ")
    before = (lab.root / "dvc.lock").read_text()
    failed = lab.attempt("dvc", "repro", STANDIN_FAIL="report")
    assert failed.returncode != 0
    assert "results/logs/report/findings.log ends with\n    kvlab report: failed" in failed.stderr
    assert (lab.root / "dvc.lock").read_text() == before
    lab.ran()
    lab.run("dvc", "repro")
    assert [line.partition(" ")[0] for line in lab.ran()] == ["compare", "metrics", "report", "verdict"]
    assert lab.files().keys() == reproduced.files().keys()
