"""How long a run still takes. The Snakefile's `onstart` calls `tell`, and a line a minute says so.

    python workflow/scripts/progress.py       records what the jobs of the last run took, in workflow/seconds.tsv

A job is known by the file of its benchmark. It is expected to take what is recorded of it, times how much slower or
faster than recorded the jobs of this run have been so far.
"""

from __future__ import annotations

import csv
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

RECORDED = Path(__file__).resolve().parents[1] / "seconds.tsv"
BENCHMARKS = Path("results/benchmarks")
TICK, EVERY = 5.0, 60.0  # seconds between two looks, and between two lines
UNKNOWN = 30.0  # seconds of a job like none that is recorded
ENOUGH = 60.0  # recorded seconds of finished jobs from which on this run's own pace counts


@dataclass
class Job:
    """A job of this run.

    Attributes
    ----------
    expected : float
        Seconds, as recorded.
    began, ended : float or None
        Times, where known.
    """

    expected: float
    began: float | None = None
    ended: float | None = None


def pace(jobs):
    """How many times longer than recorded the finished jobs took; 1 as long as few are finished."""
    done = [job for job in jobs if job.began is not None and job.ended is not None]
    expected = sum(job.expected for job in done)
    return sum(job.ended - job.began for job in done) / expected if expected >= ENOUGH else 1.0


def left(jobs, now, cores):
    """Seconds until all jobs are done, were each core busy until then; no less than the longest job takes."""
    factor = pace(jobs)
    rest = [
        max(job.expected * factor - (now - job.began if job.began is not None else 0.0), 0.0)
        for job in jobs
        if job.ended is None
    ]
    return max(sum(rest) / cores, max(rest, default=0.0))


def expected(name, recorded):
    """Seconds of a job as recorded: its own, else the mean of its kind on other models, else `UNKNOWN`.

    Names read ``stage/model/kind``.
    """
    if name in recorded:
        return recorded[name]
    alike = [seconds for other, seconds in recorded.items() if kind_of(other) == kind_of(name)]
    return sum(alike) / len(alike) if alike else UNKNOWN


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

    def __init__(self, dag, cores):
        recorded = read()
        self.dag, self.cores, self.start = dag, cores, time.time()
        working = [job for job in dag.needrun_jobs(exclude_finished=False) if job.benchmark]
        self.jobs = {job: Job(expected(name_of(job.benchmark), recorded)) for job in working}

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
        done = sum(job.ended is not None for job in self.jobs.values())
        return f"{words(left(self.jobs.values(), now, self.cores))}: {done} of {len(self.jobs)} jobs are done"


def words(seconds):
    """A time left, in whole minutes."""
    minutes = round(seconds / 60)
    return f"About {minutes} min left" if minutes else "Less than a minute left"


def tell(dag, cores):
    """Begin to say how long is left, until this process ends."""
    run = Run(dag, cores)
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
