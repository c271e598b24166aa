"""kill_runs: whom it kills, with which parameters, and that a wrong end is seen. No Snakemake, no DVC."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = (ROOT / "workflow" / "scripts", ROOT / "validation" / "pipeline")
REPRO = ("dvc", "repro")
WAIT = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def kill_runs(monkeypatch):
    for folder in SCRIPTS:
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("kill_runs")


@pytest.fixture
def run(tmp_path):
    """A process that starts something called snakemake, which starts something like two workers."""
    (tmp_path / "kvlab.py").write_text(WAIT)
    (tmp_path / "snakemake").write_text(
        "import subprocess, sys\n"
        "verbs = (['step', 'jobs'], ['gate', 'report'])\n"
        "workers = [subprocess.Popen([sys.executable, '-m', 'kvlab', *verb]) for verb in verbs]\n"
        "for worker in workers: worker.wait()\n"
    )
    starter = (
        f"import subprocess; subprocess.run([{sys.executable!r}, {str(tmp_path / 'snakemake')!r}, '--', 'report'])"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", starter], cwd=tmp_path, **pipes) as leader:
        assert leader.stdout.readline() == leader.stdout.readline() == b"\n"
        yield psutil.Process(leader.pid)
        leader.stdin.close()


def test_each_victim_is_found_among_the_processes_of_a_run(kill_runs, run, tmp_path):
    chance = random.Random(0)
    found = {name: kill_runs.victims(name, run, chance) for _, name in kill_runs.KINDS}
    assert found[kill_runs.DVC_ALONE] == [run]
    assert [process.ppid() for process in found[kill_runs.SNAKEMAKE_ALONE]] == [run.pid]
    assert [process.ppid() for process in found[kill_runs.WORKER]] == [found[kill_runs.SNAKEMAKE_ALONE][0].pid]
    assert len(found[kill_runs.ALL]) == 4 == len(kill_runs.processes_in(tmp_path))
    assert kill_runs.at_work(run) == "report: gate, jobs"


def test_kinds_take_turns_and_parameters_really_change(kill_runs, monkeypatch):
    struck = []

    def play(lab, attempt, truth, chance):
        struck.append(attempt)
        return None if len(struck) % 3 == 0 else attempt  # every third comes too late

    monkeypatch.setattr(kill_runs, "play", play)
    truth = dict.fromkeys(kill_runs.STATES)
    rows = list(kill_runs.rows_of(None, truth, 2 * len(kill_runs.KINDS), random.Random(5)))
    first, second = rows[: len(kill_runs.KINDS)], rows[len(kill_runs.KINDS) :]
    for half in (first, second):
        assert {(row.tool, row.victim) for row in half} == set(kill_runs.KINDS)
    assert sum(row.then != row.towards for row in rows) == len(kill_runs.KINDS)
    left = [attempt.then if attempt in rows else attempt.towards for attempt in struck]
    assert all(before != attempt.towards for before, attempt in zip(left, struck[1:], strict=False))


def test_only_what_is_known_to_help_is_typed(kill_runs, tmp_path):
    class Lab:
        def __init__(self, *answers):
            self.answers, self.typed = list(answers), []

        def type(self, command):
            self.typed.append(command)
            return (0, "") if command == kill_runs.REMEDY else self.answers.pop(0)

    broken = (255, "'./dvc.lock' validation failed.")
    assert kill_runs.recover(Lab((0, "")), REPRO)[1] == "same command"
    assert kill_runs.recover(Lab(broken, (0, "")), REPRO)[1] == "rm dvc.lock, same command"
    lab = Lab((1, "error: another run"))
    assert kill_runs.recover(lab, REPRO) == ("error: another run", None)
    assert lab.typed == [REPRO]
