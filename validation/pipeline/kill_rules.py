"""Kill rules with SIGKILL at random moments, type the same command again, and compare every table.

    python validation/pipeline/kill_rules.py --times 20 --seed 0

In a workspace of its own (.runs/kill-test) a preset is run undisturbed once. Then come rounds: the results of
some jobs are removed with all that follows from them, the report is asked for, and at a random moment of one
of these jobs either the job or Snakemake itself is killed, with all its children; the same command is typed
again, the next one is killed, and so on, until it may finish. After each round the files must be the same,
byte for byte (parquet: value for value), with nothing temporary left and every planned file there. Every second time
the moment is the job's first write. Logs and benchmarks are not compared: they hold seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "workflow" / "scripts")]

import outcome  # noqa: E402
import workspace  # noqa: E402

from kvlab.output.format import fixed, table  # noqa: E402

HEADERS = ("attempt", "round", "killed", "job", "moment", "s after start", "half-written", "equal")
VICTIMS = ("the rule", "snakemake")
MOMENTS = ("any", "first write")
PATIENCE = 4  # rounds in which one attempt may be missed because its job was quicker than the hand
BLINK, NAP = 0.0001, 0.01  # seconds between two looks: for a file about to be written, for a job to start
LISTED = 0.5  # seconds after which the processes of a job are listed again


@dataclass
class Attempt:
    """What is to be killed, and when: `delay` is in seconds after the job's start."""

    job: outcome.Job
    victim: str
    moment: str
    delay: float
    missed: int = 0


@dataclass
class Ended:
    """How one run of Snakemake ended: by which attempt, seconds after its start, and what it said."""

    attempt: Attempt | None
    seconds: float
    half_written: int
    returncode: int
    output: str


@dataclass
class Row:
    """One kill, as the table shows it; `half_written` counts the temporary files that it left."""

    round: int
    attempt: Attempt
    seconds: float
    half_written: int
    equal: bool = True

    def cells(self, number):
        name = f"{self.attempt.job.rule} {Path(self.attempt.job.log).stem}"
        words = [str(number), str(self.round), self.attempt.victim, name, self.attempt.moment]
        return [*words, fixed(self.seconds, 1), str(self.half_written), "yes" if self.equal else "NO"]


def preset_text(preset, changes):
    """params.yaml with a preset and `--set` put over it."""
    command = [sys.executable, "-m", "kvlab", "params", "--preset", preset, "--yaml"]
    for change in changes:
        command += ["--set", change]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    resolved = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if resolved.returncode:
        sys.exit(resolved.returncode)
    return resolved.stdout


def make_workspace(place, preset, changes):
    """An empty workspace with the parameters of a preset and of `--set`."""
    text = preset_text(preset, changes)
    shutil.rmtree(place, ignore_errors=True)
    os.chdir(ROOT)  # workspace.py links what lies here
    workspace.make(place, text)


def seconds_of(place, job):
    """How long a job took in the undisturbed run."""
    lines = (place / job.benchmark).read_text().splitlines()
    return float(dict(zip(*(line.split("\t") for line in lines[:2]), strict=True))["s"])


def decks(chance, things, length):
    """`length` things in random order; none comes again before all others have come."""
    drawn = []
    while len(drawn) < length:
        drawn += chance.sample(things, len(things))
    return drawn[:length]


def attempts(place, jobs, times, chance):
    """All attempts: every rule in turn, one of its jobs at random, a moment within its time."""
    chosen = decks(chance, sorted({job.rule for job in jobs}), times)
    victims, moments = decks(chance, VICTIMS, times), decks(chance, MOMENTS, times)
    for rule, victim, moment in zip(chosen, victims, moments, strict=True):
        job = chance.choice([job for job in jobs if job.rule == rule])
        yield Attempt(job, victim, moment, chance.uniform(0, seconds_of(place, job)))


def take_away(path):
    """A file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove(place, jobs, chosen):
    """Remove the files of some jobs and all that follows from them: a run that was stopped half-way."""
    forced = [path for job in chosen for path in job.outputs]
    plan = outcome.snakemake(place, "-n", "-p", outcome.REPORT, "--forcerun", *forced)
    following = [job for job in jobs if job.log in plan.stdout]
    if plan.returncode or not set(chosen) <= set(following):
        sys.exit(f"error: Snakemake gives no plan for {forced}:\n{plan.stdout}")
    for path in (path for job in following for path in job.outputs):
        take_away(place / path)
    take_away(place / outcome.STORE)  # what was measured before would leave nothing to be killed at


def process_of(job, parent):
    """The shell of a running job among Snakemake's children, or None; only its command names its log."""
    try:
        for child in parent.children():
            if any(job.log in word for word in child.cmdline()):
                return child
    except psutil.Error:
        pass
    return None


def begun(pending, parent):
    """The first pending attempt whose job runs, and the job's process; waits, and is None when Snakemake ends."""
    while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
        for attempt in pending:
            process = process_of(attempt.job, parent)
            if process is not None:
                return attempt, process
        time.sleep(NAP)
    return None


def written(place, job):
    """What a job has written so far: its outputs, and the temporary files that are to become them."""
    found = set()
    for folder in {os.path.dirname(path) for path in job.outputs}:
        names = {os.path.basename(path) for path in job.outputs}
        with contextlib.suppress(FileNotFoundError):
            found |= {f"{folder}/{name}" for name in os.listdir(place / folder) if name in names or name[0] == "."}
    return found


def family(process):
    """A process and all its descendants; those that are there."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_for_write(place, job, process, root):
    """Return when a job writes, with the family of `root`: to list it then would take longer than the write."""
    before = written(place, job)  # a killed writer's leavings
    doomed, listed = family(root), time.monotonic()
    while process.is_running() and written(place, job) <= before:
        if time.monotonic() - listed > LISTED:
            doomed, listed = family(root), time.monotonic()
        time.sleep(BLINK)
    return doomed


def moment_comes(place, attempt, process, root, chance):
    """Wait for the moment, and return whom to kill; nobody when the job was done before."""
    if attempt.moment == "any":
        time.sleep(attempt.delay)
        doomed = family(root)
    else:
        doomed = wait_for_write(place, attempt.job, process, root)
        time.sleep(chance.choice((0, BLINK, 10 * BLINK)))
    try:
        return doomed if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.NoSuchProcess:
        return []


def kill(processes):
    """SIGKILL processes and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # at once: psutil would first look whether it is still the same
    psutil.wait_procs(processes, timeout=30)


def session(leader):
    """Processes of a session, its leader apart: whatever Snakemake started that has outlived it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if process.pid != leader and os.getsid(process.pid) == leader:
                found.append(process)
    return found


def run(place, pending, chance):
    """Run Snakemake until the moment of a pending attempt comes, or to its end when none is pending."""
    log = place / ".snakemake" / "kill-test.log"
    attempt, before = None, outcome.temporaries(place)
    with log.open("w") as stream:
        begin = time.monotonic()
        command = [outcome.BIN / "snakemake", outcome.REPORT]
        running = subprocess.Popen(
            command,
            cwd=place,
            env=outcome.surroundings(place),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        parent, waiting = psutil.Process(running.pid), list(pending)
        while attempt is None and (found := begun(waiting, parent)) is not None:
            candidate, process = found
            waiting.remove(candidate)
            root = parent if candidate.victim == "snakemake" else process
            doomed = moment_comes(place, candidate, process, root, chance)
            if doomed:
                kill(doomed)
                attempt = candidate
        seconds = time.monotonic() - begin
        running.wait()
        kill(session(running.pid))  # what was born while the others died
    half_written = len(outcome.temporaries(place) - before)
    return Ended(attempt, seconds, half_written, running.returncode, log.read_text())


def play(place, pending, number, chance):
    """One round: kill every pending attempt in its turn, typing the same command, and let the last run finish.

    Returns the rows, the attempts that were missed, and what is wrong with the last run.
    """
    rows, pending = [], list(pending)
    while (ended := run(place, pending, chance)).attempt is not None:
        pending.remove(ended.attempt)
        rows.append(Row(number, ended.attempt, ended.seconds, ended.half_written))
    wrong = [f"the rerun ended with {ended.returncode}:\n{ended.output}"] if ended.returncode else []
    return rows, pending, wrong


def disorder(place):
    """What may not be after any run: temporary files, rows or cells twice, planned files that are missing."""
    found = [f"left behind: {path}" for path in sorted(outcome.temporaries(place))]
    return found + outcome.miscounted(outcome.token_tables(place)) + outcome.unfinished(place)


def sweep(place):
    """Remove what is temporary, so that the next attempt is not blamed for that of this one."""
    for name in outcome.temporaries(place):
        take_away(place / name)


def undisturbed(place):
    """The files of a run that nobody disturbs, or the end."""
    begin = time.monotonic()
    run = outcome.snakemake(place, outcome.REPORT)
    bad = [run.stdout] if run.returncode else disorder(place)
    if bad:
        sys.exit("\n".join(["error: the undisturbed run is not in order", *bad]))
    expected = outcome.hashes(place)
    cells = sum(found["cell_id"].n_unique() for found in outcome.token_tables(place).values())
    took = fixed(time.monotonic() - begin, 0)
    print(f"Undisturbed: {len(expected)} files, {cells} cells, {took} s", flush=True)
    return expected


def again(missed):
    """The attempts of a round that were missed, with less time before the next kill."""
    for attempt in missed:
        attempt.delay, attempt.missed = attempt.delay / 2, attempt.missed + 1
        if attempt.missed == PATIENCE:
            sys.exit(f"error: could not catch {attempt.job.log} at work in {PATIENCE} rounds")
    return missed


def parse():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--times", type=int, default=20, help="how often to kill")
    arguments.add_argument("--together", type=int, default=4, help="kills in one round, at most")
    arguments.add_argument("--seed", type=int, default=0, help="chooses jobs and moments")
    arguments.add_argument("--preset", default="quick", help="a file of workflow/presets, without .yaml")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one parameter")
    arguments.add_argument("--at", type=Path, default=ROOT / ".runs" / "kill-test", help="emptied before it is used")
    return arguments.parse_args()


def main():
    given = parse()
    place, chance = given.at.absolute(), random.Random(given.seed)
    make_workspace(place, given.preset, given.set)
    expected = undisturbed(place)
    jobs = outcome.planned_jobs(place)
    todo, rows = list(attempts(place, jobs, given.times, chance)), []
    for number in itertools.count(1):
        batch, todo = todo[: given.together], todo[given.together :]
        remove(place, jobs, [attempt.job for attempt in batch])
        killed, missed, bad = play(place, batch, number, chance)
        bad += outcome.differences(expected, outcome.hashes(place)) + disorder(place)
        sweep(place)
        todo += again(missed)
        for row in killed:
            row.equal = not bad
            rows.append(row)
            print(" | ".join(row.cells(len(rows))), flush=True)
        print(*bad, sep="\n", end="\n" if bad else "", flush=True)
        if not todo:
            break
    wrong = sum(not row.equal for row in rows)
    print("", table(HEADERS, [row.cells(i) for i, row in enumerate(rows, 1)]), "", sep="\n")
    print(f"{len(rows)} killed, {wrong} in a round that ended otherwise")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
