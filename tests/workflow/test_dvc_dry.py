"""dvc_dry.py on a small repository with real DVC: what a dry run names where files are missing; it makes none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "workflow" / "scripts" / "dvc_dry.py"
STAGES = """\
stages:
  weights:
    cmd: cp source.txt model/weights
    deps: [source.txt]
    outs: [model/weights]
  first:
    cmd: mkdir -p out && cp model/weights out/first
    deps: [model]
    outs: [out/first]
  second:
    cmd: cat params.yaml out/first > out/second
    deps: [out/first]
    params: [bits]
    outs: [out/second]
  third:
    cmd: cp out/second out/third
    deps: [out/second]
    outs: [out/third]
"""


def run(folder: Path, *command) -> str:
    own = {"DVC_SITE_CACHE_DIR": str(folder.with_name("site"))}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ | own)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dry(folder: Path, *command: str) -> list[str]:
    """The stages that a dry run names."""
    return re.findall(r"^Running stage '(\w+)'", run(folder, sys.executable, SCRIPT, *command, "--dry"), re.MULTILINE)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A repository in which `dvc repro` has run."""
    folder = tmp_path_factory.mktemp("dry") / "made"
    folder.mkdir()
    (folder / "model").mkdir()  # some of it is in git, some is made
    files = {"dvc.yaml": STAGES, "params.yaml": "bits: 3\n", "source.txt": "x\n", "model/config.json": "{}\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    for line in ("init -q -b main", "config user.name a", "config user.email a@example.org"):
        run(folder, "git", *line.split())
    dvc = [sys.executable, SCRIPT]
    run(folder, *dvc, "init", "-q")
    run(folder, *dvc, "repro", "-q")  # without --dry it is DVC
    assert (folder / "out/third").read_text() == "bits: 3\nx\n"
    run(folder, "git", "add", "-A")
    run(folder, "git", "commit", "-q", "-m", "made")
    return folder


@pytest.fixture
def clone(made, tmp_path) -> Path:
    """A clone of it: no results, no cache."""
    run(tmp_path, "git", "clone", "-q", made, "clone")
    return tmp_path / "clone"


@pytest.mark.nightly
@pytest.mark.parametrize("command", [("repro",), ("exp", "run", "-S", "bits=4")])
def test_a_fresh_clone_names_every_stage_and_makes_nothing(clone, command):
    assert dry(clone, *command) == ["weights", "first", "second", "third"]
    assert not (clone / "out/first").exists() and run(clone, "git", "status", "--short") == ""


@pytest.mark.nightly
def test_beside_results_it_names_what_changed_and_what_comes_after(made):
    assert dry(made, "repro") == []
    for more in ((), ("--allow-missing",)):
        assert dry(made, "exp", "run", *more) == []
        assert dry(made, "exp", "run", *more, "-S", "bits=4") == ["second", "third"]
    assert (made / "params.yaml").read_text() == "bits: 3\n" and run(made, "git", "status", "--short") == ""


@pytest.mark.nightly
def test_models_that_params_yaml_does_not_have_are_named_with_what_to_run(clone):
    """As after `kvlab init` in a checkout: DVC's own words name a place of dvc.yaml."""
    stages = (clone / "dvc.yaml").read_text()
    (clone / "dvc.yaml").write_text(
        stages.replace("deps: [source.txt]", "deps: ['${models[0].path}', '${models[1].path}']")
    )
    (clone / "params.yaml").write_text("bits: 3\nmodels:\n- path: source.txt\n")
    for command in (("repro", "--dry"), ("status",)):
        failed = subprocess.run([sys.executable, SCRIPT, *command], cwd=clone, capture_output=True, text=True)
        assert failed.returncode != 0
        line = "error: params.yaml has no models[1], which dvc.yaml names; run: make sync"
        assert failed.stderr.splitlines()[-1] == line
    (clone / "params.yaml").write_text("bits: 3\nmodels:\n- path: source.txt\n- path: nowhere.txt\n")
    failed = subprocess.run([sys.executable, SCRIPT, "repro"], cwd=clone, capture_output=True, text=True)
    assert failed.returncode != 0 and "make sync" not in failed.stderr
