"""What `make findings` made of several models, recorded by `make adopt`: DVC has nothing left to run for the report."""

from __future__ import annotations

import re
import sys

import pytest
from ruamel.yaml import YAML

pytestmark = pytest.mark.nightly

READY = ".venv/ready-cpu"
STAGES = re.compile(r"^(\w+) +(recorded|up to date|left: .*)$", re.MULTILINE)


def make(lab, *arguments) -> str:
    """`make` with the environment of these tests for a set-up."""
    return lab.run("make", f"--old-file={READY}", *arguments)


def asked_for(lab) -> list[str]:
    """The studies that params.yaml asks for."""
    return YAML().load(lab.root / "params.yaml")["studies"]


@pytest.fixture(params=[["ladder"], []], ids=["ladder", "nothing"])
def asked(request, unrun, tmp_path):
    """A clone of two models, the second one measured by the factorial alone; no mitigations are asked for."""
    lab = unrun.copy(tmp_path)
    yaml = YAML()
    params = yaml.load(lab.root / "params.yaml")
    params["models"].append({"path": "models/other", "studies": []})
    params["studies"] = request.param
    yaml.dump(params, lab.root / "params.yaml")
    (lab.root / ".venv").symlink_to(sys.prefix)
    lab.run(sys.executable, "workflow/scripts/dvc_sync.py")
    lab.run("git", "commit", "-q", "-a", "-m", "two models")
    return lab


def test_what_the_default_run_made_is_recorded_and_the_report_runs_nothing(asked):
    make(asked, "findings")
    ran = asked.ran()
    assert not any(line.startswith(("choose ", "restore ")) for line in ran)
    assert any("results/ladder/" in line for line in ran) == ("ladder" in asked_for(asked))
    made = asked.files()
    fates = dict(STAGES.findall(make(asked, "adopt")))
    recorded = {name for name, fate in fates.items() if fate == "recorded"}
    assert {"data", "calibration", "studies", "gate", "report"} <= recorded
    said = asked.run("dvc", "repro", "report")
    assert asked.ran() == [] and "Running stage" not in said
    assert made.items() <= asked.files().items()
    assert set(STAGES.findall(make(asked, "adopt"))) == {
        (name, fate if name not in recorded else "up to date") for name, fate in fates.items()
    }
    asked.forget()
    asked.run("dvc", "repro", "report")  # from the cache
    assert asked.ran() == [] and made.items() <= asked.files().items()


@pytest.mark.parametrize("asked", [[]], indirect=True, ids=["nothing"])
def test_dvc_alone_makes_nothing_of_what_nobody_asks_for(asked):
    asked.run("dvc", "repro", "studies")
    assert not any(line.startswith("choose ") or "results/ladder/" in line for line in asked.ran())
    assert all(list((asked.root / "results" / name).iterdir()) == [] for name in ("choice", "ladder"))
    assert "choice_layers" in asked.run("snakemake", "--dry-run", "choice")  # typed by hand it is made all the same
