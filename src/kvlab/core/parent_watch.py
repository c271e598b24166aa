"""A job does not outlive the run that started it, and writes nothing once another run has begun.

After `kill -9` of Snakemake its jobs would go on, and put results of old parameters over those of the next run.
So Snakemake tells its jobs whose they are (`announce`); a job ends soon after that process (`follow_run`), and
`check` refuses what it would still put in place. On a cluster the Snakemake beside the job lives on when the one
that submitted it is killed: there the run's turn tells, which the next run takes over (`pass_on`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from functools import cache
from pathlib import Path

import psutil

from kvlab.core.errors import RunGone

RUN = "KVLAB_RUN"  # process id of the Snakemake that runs the job
TURN = "KVLAB_TURN"  # TOKEN:FILE; the file holds another token as soon as another run has begun
GLANCE = 0.5  # seconds between two looks at the process that is followed
ABANDONED = 1  # exit code of who has lost the process that it followed


def announce() -> None:
    """Make every job that this process starts end with it."""
    os.environ[RUN] = str(os.getpid())


def pass_on(token: str, file: Path) -> None:
    """Make every job of this run, also on a cluster, write nothing once `file` no longer holds `token`."""
    os.environ[TURN] = f"{token}:{file.absolute()}"


def follow_run() -> None:
    """End this job when the process that runs it ends; outside a run nothing happens.

    Raises
    ------
    RunGone
        When that process has ended already.
    """
    check()
    if RUN in os.environ:
        follow(_ancestor(int(os.environ[RUN])), "the run that started this job")


def check() -> None:
    """Refuse to go on in the name of a run that is over.

    Raises
    ------
    RunGone
        When the process that runs this job has ended, or another run has begun.
    """
    if RUN in os.environ and not alive(_ancestor(int(os.environ[RUN]))):
        raise RunGone("the run that started this job is gone; what it had not finished was not written")
    if TURN in os.environ and _is_over(os.environ[TURN]):
        raise RunGone("another run has begun since this job was started; what it had not finished was not written")


def alive(process: psutil.Process | None) -> bool:
    """Whether a process runs; one that has ended and only waits for its parent to notice does not."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def follow(process: psutil.Process, name: str) -> None:
    """End this process, and all that it started, within a second of the end of another."""
    threading.Thread(target=_wait_and_end, args=(process, name), daemon=True).start()


def _wait_and_end(process: psutil.Process, name: str) -> None:
    while alive(process):
        time.sleep(GLANCE)
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone too
        print(f"error: {name} is gone; this process ends too", file=sys.stderr, flush=True)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(ABANDONED)  # the main thread may be anywhere, so it is not asked


@cache
def _ancestor(pid: int) -> psutil.Process | None:
    """The process `pid` if this one descends from it: who has lost it was adopted by another."""
    me = psutil.Process()
    return next((process for process in [me, *me.parents()] if process.pid == pid), None)


def _is_over(turn: str) -> bool:
    token, _, file = turn.partition(":")
    try:
        return token not in Path(file).read_text()
    except OSError:  # someone removed it; then no other run has begun
        return False
