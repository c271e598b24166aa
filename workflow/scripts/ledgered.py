"""Every job that ends leaves an entry in the ledger: the Snakefile's `onstart` and its ends call this.

One place for all rules, whatever they run and wherever: jobs need not know of it, and their results are what they are
without it. What ends while this process lives is entered when it ends,
in the order of the jobs' names. A process that was killed leaves a note of what it meant to make; the next run enters
of it what was finished.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from job_records import Records

from kvlab.core.errors import KvlabError
from kvlab_mechanisms.ledger.jobs import enter, entry_of

NOTE = Path(".snakemake/ledger.json")  # names of jobs that began and have no entry yet


def begin(workflow):
    """Enter what a killed run finished, and note what this one is to make; no run begins on a log that cannot be read.

    `snakemake --touch` makes nothing, so it enters nothing.
    """
    if workflow.touch:
        return
    dag = workflow.dag
    wanted = set(dag.needrun_jobs())
    left = set(json.loads(NOTE.read_text())) if NOTE.exists() else set()
    ended = [job for job in dag.jobs if name_of(job) in left and job not in wanted]
    add(ended)
    note(left - set(map(name_of, ended)) | {name_of(job) for job in wanted if job.output})


def end(workflow):
    """Enter what this run has finished."""
    if workflow.touch or not NOTE.exists():
        return
    dag = workflow.dag
    left = set(json.loads(NOTE.read_text()))
    ended = [job for job in dag.jobs if name_of(job) in left and dag.finished(job)]
    add(ended)
    note(left - set(map(name_of, ended)))


def add(jobs):
    """Enter jobs that have ended; one line and exit code 1 where the ledger does not take them."""
    records, entries = Records(), []
    try:
        for job in sorted(jobs, key=name_of):
            outputs = sorted(map(str, job.output))
            if any(not Path(path).exists() for path in outputs):
                print(f"ledger: no entry of {name_of(job)}: its files are not on this machine", file=sys.stderr)
                continue
            entries.append(of(job, outputs, records))
        added, torn = enter(entries)
    except KvlabError as problem:
        print(f"error: ledger: {problem}", file=sys.stderr)
        raise SystemExit(1) from None
    if torn:
        print(f"ledger: a last line of {torn} bytes had no end and was taken away; its job is entered again")
    if entries:
        print(f"ledger: {added} of {len(entries)} jobs came out new", file=sys.stderr)


def of(job, outputs, records):
    """A job's entry; inputs that Snakemake has taken the digest of are not read again."""
    record = records.of(outputs[0])  # none where Snakemake was told to keep none
    sums, params = (record.input_checksums or {}, record.params) if record else ({}, None)
    taken = {path: sha.removeprefix("sha256:") for path, sha in sums.items() if sha}
    inputs = [path for path in sorted(set(map(str, job.input))) if Path(path).exists()]
    return entry_of(name_of(job), inputs, outputs, params, taken)


def name_of(job):
    """A job's rule and wildcards."""
    return " ".join([job.rule.name, *(f"{name}={value}" for name, value in sorted(job.wildcards_dict.items()))])


def note(names):
    """Remember jobs until they have ended."""
    draft = NOTE.with_suffix(".tmp")
    draft.write_text(json.dumps(sorted(names)))
    draft.replace(NOTE)
