"""Traps of Snakemake under DVC that gave wrong results or lost runs when they were tried: what keeps each shut.

Most need no run: a look at the rules as Snakemake parses them, and at dvc.yaml.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rules(inspected):
    """The rules by name."""
    return inspected("rules")["rules"]


@pytest.fixture(scope="module")
def stages():
    """The stages of dvc.yaml by name."""
    return yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def outs(stage):
    """Entries under `outs`, `metrics` and `plots`."""
    return [out for kind in ("outs", "metrics", "plots") for out in stage.get(kind, [])]


def test_the_profile_is_where_snakemake_looks_for_it():
    """Beside a Snakefile at the root that is ./profiles/default; without it no core count is known."""
    mode = subprocess.run(["git", "ls-files", "-s", "profiles"], cwd=ROOT, capture_output=True, text=True).stdout
    assert mode.startswith("120000 ")
    assert (ROOT / "profiles/default/config.yaml").samefile(ROOT / "workflow/profiles/default/config.yaml")


@pytest.mark.full
def test_no_rule_shares_results_through_snakemake_s_own_cache(rules):
    """Its key leaves out wildcards: another engine or layer would silently get the first one's file."""
    assert [name for name, rule in rules.items() if rule["cache"]] == []


def test_every_out_is_cached_and_removed_before_its_stage_runs(stages):
    """`cache: false` and `persist: true` switch the stage's run-cache off, and kept files may hold old results."""
    assert [out for stage in stages.values() for out in outs(stage) if not isinstance(out, str)] == []


@pytest.mark.full
def test_parameters_reach_a_rule_by_name_and_never_as_a_file(rules):
    """params.yaml as an input reruns everything; loose params are compared as a set of values without names."""
    assert [name for name, rule in rules.items() if "params.yaml" in rule["input"]] == []
    working = {name: rule["params"] for name, rule in rules.items() if rule["runs"]}
    # `folder`: where the outputs lie; `measure`: which they are; `foreign`: codecs of other packages, with their
    # versions; `told`: what is said of models; `codecs`: of whole caches; `replay`: what rows are measured again by;
    # the codes: what measures the rows of the gate
    codes = {"code", "measured_code", "rows_code"}
    allowed = codes | {"codecs", "cfg", "folder", "foreign", "measure", "replay", "told"}
    assert {name: params for name, params in working.items() if not set(params) <= allowed} == {}


def test_a_command_of_dvc_says_nothing_of_how_jobs_are_run(stages):
    """It is part of the key of the run-cache: cores, executor and profile belong into profiles and environment."""
    for name, stage in stages.items():
        assert re.fullmatch(rf"snakemake --nolock --allowed-rules( \w+)+ -- {name}", stage["cmd"]), name


@pytest.mark.full
def test_no_rule_reads_a_folder(rules):
    """Snakemake does not see what changes inside; where a job makes one, the file beside it is what is read."""
    folders = {folder for rule in rules.values() for folder in rule["folders"]}
    assert folders
    read = {path for rule in rules.values() if rule["runs"] for path in rule["input"]}  # targets only ask
    assert {path for path in read if any(re.fullmatch(pattern(folder), path) for folder in folders)} == set()


def pattern(path):
    """A path with wildcards, `{name}` or `{name,what it may be}`, as a regular expression; also for what lies in it."""
    return "[^/.]+".join(map(re.escape, re.split(r"\{\w+(?:,[^{}]*)?\}", path))) + "(/.*)?"


@pytest.mark.full
def test_what_differs_in_every_run_is_no_result(rules, stages):
    """Logs and benchmarks hold times: in an out they would change its hash, and everything after it would run."""
    made = [out for stage in stages.values() for out in outs(stage)]
    aside = [path for rule in rules.values() for path in rule["aside"]]
    assert aside
    assert [path for path in aside for out in made if path == out or path.startswith(f"{out}/")] == []
    read = {path for rule in rules.values() for path in rule["input"]}
    assert not read & set(aside)
