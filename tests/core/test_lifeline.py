"""A job ends with its run and writes nothing after it: seen on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from kvlab.cli import main as cli
from kvlab.core import parent_watch, records
from kvlab.core.errors import RunGone
from refusals import refused

PATIENCE = 30  # seconds, for a machine that is busy with other things

# A run starts a job through a shell, as Snakemake does; the job starts a process of its own and waits.
JOB = """
import subprocess, sys, time
from kvlab.core import parent_watch
parent_watch.follow_run()
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(helper.pid, flush=True)
time.sleep(600)
"""
THE_RUN = """
import os, subprocess, sys
from kvlab.core import parent_watch
parent_watch.announce()
subprocess.run(["bash", "-c", '"$0" -c "$1"; exit 0', sys.executable, os.environ["JOB"]])
"""


@pytest.fixture(autouse=True)
def outside_a_run(monkeypatch):
    """Each test begins outside any run."""
    monkeypatch.delenv(parent_watch.RUN, raising=False)
    monkeypatch.delenv(parent_watch.TURN, raising=False)
    parent_watch._ancestor.cache_clear()


@pytest.fixture
def stranger():
    """A process that runs and did not start this one."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate()


def test_outside_a_run_nothing_is_followed_and_all_is_written(tmp_path):
    before = threading.active_count()
    parent_watch.follow_run()
    records.write_text(tmp_path / "a.txt", "whole")
    assert threading.active_count() == before
    assert (tmp_path / "a.txt").read_text() == "whole"


def test_a_job_and_what_it_started_end_when_the_run_is_killed():
    environment = os.environ | {"JOB": JOB, "PYTHONPATH": str(Path(records.__file__).parents[2])}
    run = subprocess.Popen([sys.executable, "-c", THE_RUN], env=environment, stdout=subprocess.PIPE, text=True)
    helper = psutil.Process(int(run.stdout.readline()))
    job = helper.parent()
    assert run.pid in {process.pid for process in job.parents()}
    run.kill()
    run.wait()
    _, left = psutil.wait_procs([job, helper], timeout=PATIENCE)
    for process in left:
        process.kill()
    assert not left


def test_a_process_that_only_waits_to_be_noticed_is_not_alive(stranger):
    process = psutil.Process(stranger.pid)
    assert parent_watch.alive(process)
    stranger.stdin.close()
    os.waitid(os.P_PID, stranger.pid, os.WEXITED | os.WNOWAIT)  # ended, and left as it is
    assert process.status() == psutil.STATUS_ZOMBIE and not parent_watch.alive(process)
    assert not parent_watch.alive(None)


@pytest.fixture
def lost(stranger, monkeypatch):
    """This process says that it belongs to a run, and that is none of its ancestors any more."""
    monkeypatch.setenv(parent_watch.RUN, str(stranger.pid))


@pytest.fixture
def outrun(tmp_path, monkeypatch):
    """This process belongs to a run that was followed by another."""
    turn = tmp_path / "run.lock"
    turn.write_text('{"token": "first"}')
    monkeypatch.setenv(parent_watch.TURN, "")
    parent_watch.pass_on("first", turn)
    records.write_text(tmp_path / "written.txt", "by the first")
    turn.write_text('{"token": "second"}')


@pytest.mark.parametrize("over", ["lost", "outrun"])
def test_a_job_of_a_run_that_is_over_changes_no_file(over, request, tmp_path):
    path = tmp_path / "results" / "job.json"
    records.write_text(path, "of the next run")
    request.getfixturevalue(over)
    with refused(RunGone):
        records.write_text(path, "of the old run")
    with pytest.raises(RunGone):
        records.forget(path)
    assert path.read_text() == "of the next run" and list(path.parent.iterdir()) == [path]


def test_a_job_of_its_own_run_writes(tmp_path, monkeypatch):
    monkeypatch.setenv(parent_watch.RUN, str(os.getppid()))
    records.write_text(tmp_path / "a.txt", "whole")
    parent_watch.announce()  # a run may write too
    records.write_text(tmp_path / "b.txt", "whole")
    monkeypatch.setenv(parent_watch.TURN, f"first:{tmp_path / 'removed by someone'}")
    records.write_text(tmp_path / "c.txt", "whole")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_verb_of_a_run_that_is_gone_says_so_in_one_line(lost, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["params"])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (1, "")
    assert err.startswith("kvlab params: the run that started this job is gone") and err.count("\n") == 1
