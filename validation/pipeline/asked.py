"""What each job of a plan asks of a cluster: cores, memory, minutes, GPUs. A dry run; nothing is executed.

    python validation/pipeline/asked.py results/gap/FINDINGS.md
    python validation/pipeline/asked.py --json --profile workflow/profiles/slurm results/gap/FINDINGS.md

Everything but `--json` is handed to Snakemake, so that profiles and `--set-resources` count.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections import Counter
from dataclasses import asdict, dataclass

HEADERS = ("rule", "jobs", "cores", "mem_mb", "minutes", "gpus")


@dataclass(frozen=True, order=True)
class Asked:
    """What one job asks of a cluster; 0 stands for what it does not ask for."""

    rule: str
    cores: int
    mem_mb: int
    runtime: int
    gpu: int


def plan(arguments):
    """What the jobs of `snakemake -n ARGUMENTS` ask; exits as Snakemake does when there is no plan."""
    from snakemake.cli import main as snakemake
    from snakemake.logging import logger

    jobs = []

    def listen(record):
        """Take what a planned job asks out of the log, where it is no text yet; only what went wrong is printed."""
        resources = getattr(record, "resources", None)
        if resources is not None and record.shellcmd:  # a target that only gathers files is no job of a cluster
            numbers = [resources.get(name, 0) for name in ("mem_mb", "runtime", "gpu")]
            jobs.append(Asked(record.rule_name, record.threads, *numbers))
        return record.levelno >= logging.WARNING

    logger.addFilter(listen)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where a dry run says what is wrong
            snakemake(["--dry-run", *arguments])
    except SystemExit as end:
        if end.code:
            raise
    return sorted(jobs)


def read(text):
    """The jobs that `--json` has printed."""
    return [Asked(**job) for job in json.loads(text)]


def main():
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit(__doc__.rstrip())
    as_json = "--json" in arguments
    jobs = plan([given for given in arguments if given != "--json"])
    if as_json:
        print(json.dumps([asdict(job) for job in jobs]))
        return
    rows = [(job.rule, count, *list(asdict(job).values())[1:]) for job, count in sorted(Counter(jobs).items())]
    for row in (HEADERS, *rows):
        print(f"{row[0]:<20}", *(f"{cell:>8}" for cell in row[1:]))


if __name__ == "__main__":
    main()
