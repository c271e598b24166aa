"""One run at a time in a folder. The Snakefile's `onstart` calls `begin`, before any job starts.

There are three ways to get two runs, and something is done about each:

* Snakemake beside Snakemake, started by hand or by DVC. Each holds a lock of the kernel, which goes with its process
  and so is never left over; the second is refused. The file names the run whose turn it is, for
  `kvlab.core.parent_watch`.
* DVC beside Snakemake: DVC removes the outputs of a stage before it starts its Snakemake. So a Snakemake that was
  started by hand tells DVC that it reads them. DVC then refuses to remove or to store them, but still shows them.
* DVC is killed alone: the Snakemake that it started would go on, and write into what the next `dvc repro` records.
  So it ends with its DVC.

Jobs on a cluster are Snakemakes too; those run without `onstart`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
import time
from datetime import datetime
from pathlib import Path

import psutil

from kvlab.core import parent_watch

LOCK = Path(".snakemake/run.lock")
DVC = Path(".dvc")
DVC_USERS = DVC / "tmp" / "rwlock"  # DVC's own list of who reads and writes what
MADE = ("calib", "results")
PATIENCE, NAP = 3.0, 0.1  # seconds that a dying run has to go; seconds between two attempts
ANOTHER = "another run is at work in this folder"

held = contextlib.ExitStack()  # until this process ends


class Refused(Exception):
    """This run may not begin; the message is one line that says why and what to do."""


def begin():
    """Take this folder's turn until this process ends; one line and exit code 2 if another run has it."""
    try:
        if "DVC_STAGE" in os.environ:
            take_turn(starter())
        else:
            tell_dvc()  # first: whoever is refused here has not taken the turn that a stage of DVC is about to take
            take_turn(psutil.Process())
    except Refused as problem:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2) from None


def starter():
    """The DVC that started this Snakemake, which from now on ends with it."""
    users = patiently(lambda: json.loads(DVC_USERS.read_text()), ValueError)  # it may be being written
    writers = {user["pid"] for user in users["write"].values()}
    found = next((process for process in psutil.Process().parents() if process.pid in writers), None)
    if found is None:
        raise Refused("the DVC that started this stage is gone, so nothing was begun; type its command again")
    parent_watch.follow(found, "the DVC that started this stage")
    return found


def take_turn(process):
    """Lock this folder in the name of a process, and let the jobs know whose turn it is."""
    LOCK.parent.mkdir(exist_ok=True)
    stream = held.enter_context(LOCK.open("a+"))
    try:
        patiently(lambda: fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB), BlockingIOError)
    except BlockingIOError:
        raise Refused(f"{ANOTHER}{holder()}") from None
    token = secrets.token_hex(8)
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    turn = {"token": token, "pid": process.pid, "command": command(process), "host": socket.gethostname()}
    stream.truncate(0)
    stream.write(json.dumps(turn | {"since": since}) + "\n")
    stream.flush()
    parent_watch.pass_on(token, LOCK)


def refuse_beside_another():
    """Refuse in the words of `take_turn` where a run has its turn: they name it better than DVC can."""
    with contextlib.suppress(FileNotFoundError), LOCK.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"{ANOTHER}{holder()}") from None


def holder():
    """Who has the turn, and how to end that."""
    try:
        turn = json.loads(LOCK.read_text())
    except ValueError:
        return "; wait for its end"  # it has only just begun and not yet written its name
    where = "" if turn["host"] == socket.gethostname() else f" on {turn['host']}"
    words = f"`{turn['command']}`, process {turn['pid']}{where}, since {turn['since']}"
    return f": {words}; wait for its end, or stop it{where}: kill {turn['pid']}"


def command(process):
    """What was typed: without the interpreter and without folders of programs."""
    words = process.cmdline()
    words = words[1:] if Path(words[0]).name.startswith("python") else words
    return " ".join([Path(words[0]).name, *words[1:]])


def tell_dvc():
    """Register this process with DVC as a reader of all that is made here, if DVC is used here."""
    if not DVC.is_dir():
        return
    from dvc.config import Config
    from dvc.exceptions import DvcException
    from dvc.fs import localfs
    from dvc.rwlock import rwlock

    DVC_USERS.parent.mkdir(exist_ok=True)
    guard = Config(str(DVC.absolute()))["core"].get("hardlink_lock", False)
    what = [str(Path(folder).absolute()) for folder in MADE], []
    place, name = str(DVC_USERS.parent.absolute()), command(psutil.Process())
    registered = contextlib.ExitStack()
    try:
        patiently(lambda: registered.enter_context(rwlock(place, localfs, name, *what, guard)), DvcException)
    except DvcException as problem:
        reason = " ".join(str(problem).partition("\n\n")[0].split())
        refuse_beside_another()
        raise Refused(f"{ANOTHER}: {reason}; wait for its end; if there is none: rm {DVC_USERS}") from None
    atexit.register(leave, registered, DvcException)


def leave(registered, problem):
    """Sign off with DVC; where that fails, the next DVC sees that this process is gone."""
    with contextlib.suppress(problem, AssertionError):
        registered.close()


def patiently(attempt, failure):
    """What an attempt returns; it is repeated for some seconds, then its failure is raised."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return attempt()
        except failure:
            if time.monotonic() > deadline:
                raise
        time.sleep(NAP)
