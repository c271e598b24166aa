"""How long a run still takes. The Snakefile's `onstart` calls `tell`, and a line a minute says so.

    python workflow/scripts/progress.py       records what the jobs of the last run took, in workflow/seconds.tsv

A job is known by the file of its benchmark. It is expected to take what is recorded of it, times how much slower or
faster than recorded the jobs of this run have been so far; until enough of them have ended, nothing is said. What is
left takes as long as all of it on these cores, or as the longest chain of jobs that read one another.
"""

from __future__ import annotations

import csv
import functools
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

RECORDED = Path(__file__).resolve().parents[1] / "seconds.tsv"
BENCHMARKS = Path("results/benchmarks")
TICK, EVERY = 5.0, 60.0  # seconds between two looks, and between two lines
ENOUGH = 0.05  # the share of all recorded seconds that must have ended, or be overdue, before this run's pace is known
RUNS_MODEL = ("capture", "ladder", "measure")  # stages whose seconds are the model's own
OVERDUE = 0.1  # of what it has taken so far is what a job is given that should have ended


@dataclass(eq=False)
class Job:
    """A job of this run.

    Attributes
    ----------
    expected : float or None
        Seconds, as recorded; None where neither it nor its like is.
    needs : list of Job
        Those that it waits for.
    began, ended : float or None
        Times, where known.
    """

    expected: float | None
    needs: list[Job] = field(default_factory=list)
    began: float | None = None
    ended: float | None = None


def pace(jobs, now):
    """How many times longer than recorded jobs take here, from those that ended or are overdue; None if too few are."""
    begun = [job for job in jobs if job.expected and job.began is not None]
    ended = [(job.ended - job.began, job.expected) for job in begun if job.ended is not None]
    took, expected = map(sum, zip(*ended, strict=True)) if ended else (0.0, 0.0)
    # one that runs says something once it has taken longer than it should have at the pace of the others
    running = [(now - job.began, job.expected) for job in begun if job.ended is None]
    for gone, recorded in sorted(running, key=lambda one: one[1] / one[0] if one[0] else float("inf")):
        if gone > recorded * (took / expected if expected else 1.0):
            took, expected = took + gone, expected + recorded
    if expected < ENOUGH * sum(job.expected for job in jobs if job.expected):
        return None
    return took / expected if expected else None


def left(jobs, now, cores):
    """Seconds until all jobs of which a time is recorded are done; None while this run's pace is not known."""
    factor = pace(jobs, now)
    if factor is None:
        return None
    seconds = {job: lasts(job, now, factor) for job in jobs}

    @functools.cache
    def until(job):
        """Seconds until a job has ended, if it waits for no core."""
        return seconds[job] + max((until(other) for other in job.needs if other.ended is None), default=0.0)

    return max(sum(seconds.values()) / cores, *map(until, jobs))


def lasts(job, now, factor):
    """Seconds that a job still takes, at a pace."""
    if job.ended is not None:
        return 0.0
    gone = now - job.began if job.began is not None else 0.0
    return max((job.expected or 0.0) * factor - gone, OVERDUE * gone)


def expected(name, recorded, parameters):
    """Seconds of a job as recorded: its own, else the mean of its kind on other models, else None.

    Names read ``stage/model/kind``. Where a model runs, what another took is multiplied by how many times more
    `parameters` it has; they are by model, where they are known.
    """
    if name in recorded:
        return recorded[name]
    alike = [
        seconds * times_larger(name, other, parameters)
        for other, seconds in recorded.items()
        if kind_of(other) == kind_of(name)
    ]
    return sum(alike) / len(alike) if alike else None


def times_larger(name, other, parameters):
    """How many times more parameters a job's model has than that of another one; 1 where no model runs."""
    stage, model, *_ = name.split("/")
    own, others = parameters.get(model), parameters.get(other.split("/")[1])
    return own / others if stage in RUNS_MODEL and own and others else 1.0


def kind_of(name):
    """A job's name without the model."""
    parts = name.split("/")
    return parts[:1] + parts[2:]


def read():
    """Seconds by the name of a job."""
    if not RECORDED.exists():
        return {}
    with RECORDED.open() as lines:
        return {name: float(seconds) for name, seconds in csv.reader(lines, delimiter="\t")}


def name_of(benchmark):
    """The name of a job: its benchmark's path below results/benchmarks, also where that lies in a remote storage."""
    return str(benchmark).partition(f"{BENCHMARKS}/")[2].removesuffix(".tsv")


class Run:
    """The jobs of this run and when they began and ended, as far as a look now and then tells."""

    def __init__(self, dag, cores, parameters):
        recorded = read()
        self.dag, self.cores, self.start = dag, cores, time.time()
        working = [job for job in dag.needrun_jobs(exclude_finished=False) if job.benchmark]
        self.jobs = {job: Job(expected(name_of(job.benchmark), recorded, parameters)) for job in working}
        for job, known in self.jobs.items():
            known.needs = [self.jobs[other] for other in dag.dependencies[job] if other in self.jobs]

    def look(self, now):
        """See which jobs have begun (their log is new) and which have ended."""
        for job, known in self.jobs.items():
            if known.began is None and any(self._new(log) for log in job.log):
                known.began = now
            if known.ended is None and self.dag.finished(job):
                known.began, known.ended = known.began or now, now

    def _new(self, log):
        path = Path(str(log))
        return path.exists() and path.stat().st_mtime >= self.start

    def line(self, now):
        """How long is left, in words."""
        jobs = self.jobs.values()
        done = sum(job.ended is not None for job in jobs)
        seconds = left(jobs, now, self.cores)
        unknown = sum(job.expected is None and job.ended is None for job in jobs)
        besides = f", plus {unknown} of unknown length" if unknown and seconds is not None else ""
        return f"{done} of {len(jobs)} jobs are done; {words(seconds)}{besides}"


def words(seconds):
    """A time left, in whole minutes."""
    if seconds is None:
        return "the time left is not known yet"
    minutes = round(seconds / 60)
    return f"about {minutes} min left" if minutes else "less than a minute left"


def tell(dag, cores, parameters):
    """Begin to say how long is left, until this process ends; `parameters` are how many each model has."""
    run = Run(dag, cores, parameters)
    if not run.jobs:
        return

    def keep_telling():
        told = -EVERY
        while True:
            now = time.time()
            run.look(now)
            if now - told >= EVERY:
                print(f"[{time.strftime('%H:%M')}] {run.line(now)}", file=sys.stderr, flush=True)
                told = now
            time.sleep(TICK)

    threading.Thread(target=keep_telling, daemon=True).start()


def main():
    """Write what the jobs here took."""
    rows = []
    for path in sorted(BENCHMARKS.rglob("*.tsv")):
        with path.open() as lines:
            rows.append((name_of(path), next(csv.DictReader(lines, delimiter="\t"))["s"]))
    with RECORDED.open("w") as out:
        csv.writer(out, delimiter="\t", lineterminator="\n").writerows(rows)
    print(f"{RECORDED}: {len(rows)} jobs")


if __name__ == "__main__":
    main()
