"""A scratch clone where Snakemake and DVC really run, with a stand-in for the program that measures."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType

import pytest
from ruamel.yaml import YAML

from kvlab.core.paramfile import preset, read_yaml
from kvlab_pipeline.studies.cells import params as cells

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
STANDIN = Path(__file__).with_name("standin.py")
MADE = ("calib", "results")
TIMEOUT = 1500  # seconds; the longest, `dvc repro` of everything, takes 400 on a machine with nothing else to do
# They would run other code, or run it elsewhere, or give it what `make test-nightly ARGS=...` gives pytest.
NOT_INHERITED = {"PYTHONPATH", "SNAKEMAKE_PROFILE", "ARGS", "MAKEFLAGS"}
WEIGHTS = 300_000  # repetitions of a model's name
# Over workflow/presets/quick.yaml: one job for each study, so that a run costs little but starting Snakemake.
SMALLER = {"engines": ["hf"], "calibration": {"ridge": 0.001}}
CELLS = {"k-only", "all-layers", "klt"}


@dataclass
class Lab:
    """A folder with the pipeline, and the trace of what has really run in it and in its experiments."""

    root: Path
    trace: Path

    def attempt(self, *command, **environment) -> subprocess.CompletedProcess:
        """Run what a person would type here."""
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        own = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "DVC_SITE_CACHE_DIR": str(self.trace.with_name("site")),
            "STANDIN_TRACE": str(self.trace),
        }
        words, where = list(map(str, command)), {"cwd": self.root, "env": inherited | own | environment}
        # files and no pipes: the workers of a queue keep them open, and the end of a pipe would be theirs
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            code = subprocess.run(words, stdout=out, stderr=err, timeout=TIMEOUT, **where).returncode
            out.seek(0), err.seek(0)
            return subprocess.CompletedProcess(words, code, out.read(), err.read())

    def run(self, *command, **environment) -> str:
        """The same, and it must succeed: what it printed."""
        done = self.attempt(*command, **environment)
        assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def ran(self, forget: bool = True) -> list[str]:
        """What ran since this was last asked: a verb and what it wrote in each line, sorted."""
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        if forget:
            self.trace.unlink(missing_ok=True)
        return sorted(lines)

    def files(self) -> dict[str, bytes]:
        """Every result by its path, logs, benchmarks and the ledger apart."""
        found = [path for part in MADE for path in (self.root / part).rglob("*") if path.is_file()]
        named = {str(path.relative_to(self.root)): path.read_bytes() for path in found}
        apart = ("results/logs", "results/bench", "results/ledger")
        return {name: data for name, data in named.items() if not name.startswith(apart)}

    def forget(self) -> None:
        """Remove all results."""
        for part in MADE:
            shutil.rmtree(self.root / part, ignore_errors=True)

    def change(self, path: str, old: str, new: str) -> None:
        """Replace a text that is in a file once."""
        text = (self.root / path).read_text()
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        (self.root / path).write_text(text.replace(old, new))

    def copy(self, place: Path) -> Lab:
        """The same folder elsewhere, to be changed there."""
        shutil.copytree(self.root, place / "lab", symlinks=True)
        return Lab(place / "lab", place / "trace")


@pytest.fixture(scope="session")
def standin() -> ModuleType:
    """The stand-in as a module: how its files are read."""
    spec = importlib.util.spec_from_file_location("standin", STANDIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def unrun(tmp_path_factory) -> Lab:
    """The scratch clone as a person has it who has just cloned: no results, no cache, no record of a run."""
    place = tmp_path_factory.mktemp("scratch")
    lab = Lab(place / "lab", place / "trace")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        # without the repository's own record and results; a deleted file is listed until git is told
        if name != "dvc.lock" and not name.startswith("results/") and os.path.lexists(ROOT / name):
            (lab.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, lab.root / name, follow_symlinks=False)
    shutil.copy(STANDIN, lab.root / "src/kvlab/__main__.py")
    write_params(lab.root)
    write_models(lab.root / "models")
    for command in ("init -q -b main", "config user.name lab", "config user.email lab@example.org"):
        lab.run("git", *command.split())
    lab.run(sys.executable, "workflow/scripts/dvc_sync.py")  # the models that are listed here
    commit(lab, "scratch")
    return lab


@pytest.fixture(scope="session")
def reproduced(unrun, tmp_path_factory) -> Lab:
    """The same after `dvc repro`, with dvc.lock committed. Tests only look at it; `lab` is a copy to change."""
    lab = unrun.copy(tmp_path_factory.mktemp("reproduced"))
    lab.run("dvc", "repro")
    commit(lab, "run")
    return lab


@pytest.fixture
def lab(reproduced, tmp_path) -> Iterator[Lab]:
    """A copy of `reproduced` for one test."""
    yield reproduced.copy(tmp_path)
    shutil.rmtree(tmp_path, ignore_errors=True)


def commit(lab: Lab, message: str) -> None:
    """Everything as it is, into git."""
    lab.run("git", "add", "-A")
    lab.run("git", "commit", "-q", "-m", message)


def write_params(root: Path) -> None:
    """The repository's own params.yaml with the quick preset's values and smaller ones: order and style stay."""
    yaml = YAML()
    params = yaml.load(root / "params.yaml")
    with contextlib.chdir(root):
        params.update(preset("quick", read_yaml(Path("params.yaml"))))
    lay_over(params, SMALLER | {"cells": dict.fromkeys(sorted(cells.CELLS.keys() - CELLS))})
    yaml.dump(params, root / "params.yaml")


def lay_over(old, new) -> None:
    """Presets: mappings are merged, anything else replaces."""
    for key, value in new.items():
        if isinstance(value, dict):
            lay_over(old.setdefault(key, {}), value)
        else:
            old[key] = value


def write_models(folder: Path) -> None:
    """models/reference and models/other with invented weights, so many that Snakemake must be told to compare them."""
    shutil.copytree(folder / "reference", folder / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("reference", "other"):
        (folder / name / "model.safetensors").write_bytes(name.encode() * WEIGHTS)
