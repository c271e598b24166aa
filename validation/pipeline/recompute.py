"""Measure one finished job again and compare what it writes with what is there, byte for byte.

    python validation/pipeline/recompute.py                          the smallest table of cells
    python validation/pipeline/recompute.py 'results/*/*/vllm-*.parquet' the smallest of these
    python validation/pipeline/recompute.py --at .runs/quick         the same in a preset's workspace

Snakemake itself runs the rule, in a scratch folder where everything else is a link: the command is the
rule's own, and nothing in the workspace is touched. The store of what was measured before is an empty one there. A
rule measures jobs of several studies at once, and all that it writes is compared; of the files that say how fast
something was, which no two runs share, it is asked that they are there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import outcome
import polars as pl

ANY = "results/*/*/*.parquet"
SHOWN = 3  # rows of a difference that are printed
TAIL = 2000  # characters of a failed run that are printed


def smallest(place, pattern=None):
    """The smallest finished table that a path or glob names, or of all that hold cells; relative to the workspace."""
    found = [path for path in place.glob(pattern or ANY) if path.suffix == ".parquet" and path.is_file()]
    if pattern is None:
        found = [path for path in found if "cell_id" in pl.read_parquet_schema(path)]
    if not found:
        sys.exit(f"error: no table matches {pattern or ANY!r} in {place}; run `make findings` first")
    return str(min(found, key=lambda path: (path.stat().st_size, path)).relative_to(place))


def mirror(place, scratch, job):
    """Links to everything in the workspace but the job's own files; results/ is a folder of links."""
    for entry in place.iterdir():
        if not entry.name.startswith(".") and entry.name != "results":
            (scratch / entry.name).symlink_to(entry.resolve())
    for name in outcome.made_files(place):
        if name.startswith("results/") and name not in (*job.outputs, job.log, job.benchmark):
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).symlink_to((place / name).resolve())


def run_again(scratch, job):
    """The rule's command, by Snakemake; no other rule may run."""
    run = outcome.snakemake(scratch, "--allowed-rules", job.rule, "--force", "--", job.outputs[0])
    if run.returncode:
        sys.exit(f"error: the rule failed:\n{run.stdout[-TAIL:]}")


def table_differences(before, after):
    """Lines that say in which columns and rows two tables differ; none when only the bytes do."""
    if before.schema != after.schema:
        return [f"columns {dict(before.schema)}, now {dict(after.schema)}"]
    if len(before) != len(after):
        return [f"{len(before)} rows, now {len(after)}"]
    differing = {name: ~before[name].eq_missing(after[name]) for name in before.columns}
    lines = []
    for name, mask in differing.items():
        if mask.any():
            old, new = before[name].filter(mask), after[name].filter(mask)
            examples = ", ".join(f"{a} now {b}" for a, b in zip(old[:SHOWN], new[:SHOWN], strict=True))
            lines.append(f"column {name}: {mask.sum()} of {len(mask)} rows differ: {examples}")
    return lines


def compare(before, after, timed=False):
    """Lines that say how a file measured again differs from the first; none when the bytes are the same.

    A `timed` file holds seconds: it has to be there, and may hold others.
    """
    if not after.is_file():
        return ["is not written again"]
    if timed or before.read_bytes() == after.read_bytes():
        return []
    lines = []
    if before.suffix == ".parquet":
        lines = table_differences(pl.read_parquet(before), pl.read_parquet(after))
    elif before.suffix == ".json":
        pairs = zip(before.read_text().splitlines(), after.read_text().splitlines(), strict=False)
        lines = [f"{old.strip()} now {new.strip()}" for old, new in pairs if old != new][:SHOWN]
    return lines or [f"the same content in other bytes: {before.stat().st_size}, now {after.stat().st_size}"]


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("pattern", nargs="?", help="path or glob of a table")
    arguments.add_argument("--at", type=Path, default=Path(), help="workspace; default: here")
    given = arguments.parse_args()
    place = Path(os.path.abspath(given.at))
    path = smallest(place, given.pattern)
    job = next(job for job in outcome.planned_jobs(place, path) if path in job.outputs)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        mirror(place, Path(folder), job)
        run_again(Path(folder), job)
        for name in job.outputs:
            lines += [f"{name}: {line}" for line in compare(place / name, Path(folder, name), outcome.is_timed(name))]
    if lines:
        sys.exit("\n".join(["error: not the same when measured again", *lines]))
    others = " and ".join(name for name in job.outputs if name != path and not outcome.is_timed(name))
    print(f"byte-identical: {path} ({len(pl.read_parquet(place / path))} rows){others and f', {others}'}")


if __name__ == "__main__":
    main()
