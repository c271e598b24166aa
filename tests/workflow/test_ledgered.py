"""Every job that ends leaves an entry in the ledger, whatever becomes of the run."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvlab_mechanisms.ledger.log import LOG, read

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "workflow" / "scripts"


@dataclass(eq=False)
class Planned:
    """A job as Snakemake plans it."""

    name: str
    input: list[str] = field(default_factory=list)

    @property
    def output(self):
        return [f"results/{self.name}.json"]

    @property
    def rule(self):
        return SimpleNamespace(name=self.name)

    @property
    def wildcards_dict(self):
        return {"model": "m"}


class Dag:
    """Which jobs there are, which of them are to run, and which have."""

    def __init__(self, jobs, needed, done=()):
        self.jobs, self.needed, self.done = jobs, needed, set(done)

    touch = False

    @property
    def dag(self):
        """A workflow and its jobs in one."""
        return self

    def needrun_jobs(self):
        return [job for job in self.jobs if job.name in self.needed]

    def finished(self, job):
        return job.name in self.done


class Told:
    """Snakemake's records: the digest of an input is known."""

    def of(self, path):
        return SimpleNamespace(params=[path], input_checksums={"given": "sha256:" + "a" * 64})


@pytest.fixture
def ledgered(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("ledgered")
    monkeypatch.setattr(module, "Records", Told)
    monkeypatch.chdir(tmp_path)
    for folder in (".snakemake", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "given").write_text("x")
    return module


def made(*jobs):
    for job in jobs:
        Path(job.output[0]).write_text(job.name)


def entered() -> list[str]:
    return [entry.job for entry in read(LOG).entries()]


def test_what_a_run_finished_is_entered_also_where_it_failed_or_was_killed(ledgered):
    a, b, c = Planned("a", ["given"]), Planned("b"), Planned("c")
    dag = Dag([c, b, a], {"a", "b", "c"})
    ledgered.begin(dag)
    made(b, a)
    dag.done = {"a", "b"}
    ledgered.end(dag)  # a run that failed at c
    assert entered() == ["a model=m", "b model=m"]
    assert read(LOG).entries()[0].inputs == {"given": "a" * 64}
    again = Dag([a, b, c], {"c"})
    ledgered.begin(again)
    made(c)  # and then the run was killed
    assert entered() == ["a model=m", "b model=m"]
    ledgered.begin(Dag([a, b], {"b"}))  # another target, which does not know of c
    ledgered.end(Dag([a, b], {"b"}, {"b"}))
    assert entered() == ["a model=m", "b model=m"], "b came out as before"
    ledgered.begin(Dag([a, b, c], {"a"}))
    assert entered() == ["a model=m", "b model=m", "c model=m"]
    assert json.loads(ledgered.NOTE.read_text()) == ["a model=m"]


def test_files_that_are_elsewhere_are_told(ledgered, capsys):
    dag = Dag([Planned("a")], {"a"}, {"a"})
    ledgered.begin(dag)
    ledgered.end(dag)
    assert "no entry of a model=m: its files are not on this machine" in capsys.readouterr().err
    assert not LOG.exists()


def test_no_run_begins_on_a_ledger_that_was_changed(ledgered, capsys):
    LOG.parent.mkdir()
    LOG.write_text("by hand\n")
    with pytest.raises(SystemExit) as left:
        ledgered.begin(Dag([Planned("a")], {"a"}))
    assert left.value.code == 1 and not ledgered.NOTE.exists()
    assert "error: ledger: results/ledger/log.jsonl, line 1 is no entry" in capsys.readouterr().err


SNAKEFILE = f"""
import sys
sys.path[:0] = ["{ROOT / "src"}", "{SCRIPTS}"]
import ledgered

rule last:
    input: "results/first.txt"
    output: directory("results/last")
    params: cfg=1
    shell: "mkdir results/last; cp {{input}} results/last; test -e go"

rule first:
    output: "results/first.txt"
    shell: "echo 1 > {{output}}"

onstart:
    ledgered.begin(workflow)

onsuccess:
    ledgered.end(workflow)

onerror:
    ledgered.end(workflow)
"""


@pytest.mark.nightly
def test_a_real_run(tmp_path):
    (tmp_path / "Snakefile").write_text(SNAKEFILE)

    def run(*arguments):
        command = [Path(sys.executable).with_name("snakemake"), "--cores", "1", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"HOME": "/tmp"})

    log = tmp_path / LOG
    assert run().returncode == 1
    assert [entry.job for entry in read(log).entries()] == ["first"]
    (tmp_path / "go").touch()
    assert run().returncode == 0
    entries = read(log).entries()
    assert [entry.job for entry in entries] == ["first", "last"]
    assert entries[1].inputs == entries[0].outputs
    before = log.read_bytes()
    assert run("--forceall").returncode == 0
    assert log.read_bytes() == before, "the same work leaves no second entry"
    (tmp_path / "results" / "first.txt").write_text("by hand")
    assert run("--touch", "--forceall").returncode == 0
    assert log.read_bytes() == before, "what is touched is not made"
