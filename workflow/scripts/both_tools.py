"""Snakemake and DVC, asked from outside: the stages of dvc.yaml, what DVC says of them, what Snakemake would make."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from dvc_sync import DVC_YAML, declared_outs, owner
from ruamel.yaml import YAML

BIN = Path(sys.executable).parent
TRIGGERS = ("code", "input", "mtime", "params", "software-env")  # also where a profile wants fewer


class Refusal(Exception):
    """The handover would record something that is not known to be right; the message is one line."""


@dataclass(frozen=True)
class Stage:
    """A stage of dvc.yaml: its outs, and the stages that it reads."""

    name: str
    outs: tuple[str, ...]
    upstream: tuple[str, ...]


@dataclass(frozen=True)
class Made:
    """A file or folder that a job of the plan makes, as `snakemake --summary` lists it."""

    path: str
    rule: str
    status: str
    pending: bool


def run(tool, *arguments):
    """Run a tool of this environment and keep what it says; Snakemake's targets are what stages of DVC make."""
    environ = os.environ | {"KVLAB_FOR_DVC": "1"}
    return subprocess.run([BIN / tool, *arguments], capture_output=True, text=True, env=environ)


def complaint(done):
    """What a failed command said, in one line: DVC's paragraph, or the last line."""
    said = done.stdout + done.stderr
    _, error, paragraph = said.partition("ERROR: ")
    if error:
        return " ".join(paragraph.partition("\n\n")[0].split())
    return said.strip().rpartition("\n")[2].strip().removeprefix("error: ") or f"exit code {done.returncode}"


def read_stages():
    """The stages of dvc.yaml by name, each after the stages that it reads."""
    if not DVC_YAML.exists():
        raise Refusal(f"there is no {DVC_YAML} here; go to the root of the repository")
    entries = YAML(typ="safe").load(DVC_YAML.read_text())["stages"]
    outs = {name: declared_outs(entry) for name, entry in entries.items()}
    upstream = {
        name: sorted({found[0] for dep in entry.get("deps", []) if (found := owner(dep, outs))})
        for name, entry in entries.items()
    }
    order = TopologicalSorter(upstream).static_order()
    return {name: Stage(name, tuple(outs[name]), tuple(upstream[name])) for name in order}


def named(names, stages):
    """The stages that were named; an unknown one is refused with the nearest."""
    for name in names:
        if name not in stages:
            near = difflib.get_close_matches(name, stages, 1, 0) or [""]
            raise Refusal(f"{name!r} is no stage of {DVC_YAML}; did you mean {near[0]!r}?")
    return [stages[name] for name in stages if name in names]


def dvc_status():
    """What is not as dvc.lock records it: {stage: {kind of change: {path: change}}}."""
    done = run("dvc", "status", "--json")
    if done.returncode:
        raise Refusal(f"dvc status: {complaint(done)}")
    changes = {}
    for stage, entries in json.loads(done.stdout).items():
        kinds = [{entry: {}} if isinstance(entry, str) else entry for entry in entries]
        changes[stage] = {kind: paths for entry in kinds for kind, paths in entry.items()}
    return changes


def plan(stages):
    """What the jobs of these stages make, and whether Snakemake would make it again; runs nothing."""
    triggers = ["--rerun-incomplete", "--rerun-triggers", *TRIGGERS]
    done = run("snakemake", "--summary", *triggers, "--", *(stage.name for stage in stages))
    if done.returncode:
        raise Refusal(f"snakemake has no plan: {complaint(done)}")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    start = next(number for number, line in enumerate(lines) if line[0] == "output_file")
    rows = [dict(zip(lines[start], line, strict=True)) for line in lines[start + 1 :]]
    return [Made(row["output_file"], row["rule"], row["status"], row["plan"] != "no update") for row in rows]


def of_stage(stage, made):
    """Those that a stage declares."""
    return [one for one in made if owner(one.path, {stage.name: stage.outs})]


def shown(paths):
    """The first of some paths, and how many more there are."""
    first, *others = sorted(paths)
    return f"{first} (and {len(others)} more)" if others else first
