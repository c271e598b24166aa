"""What a run leaves in a workspace: its jobs as Snakemake lists them, its files by content, and what is wrong.

Shared by the scripts that see the pipeline from outside only: through `snakemake`, through `kvlab` verbs and through
the files.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import polars as pl

BIN = Path(sys.executable).parent
REPORT = "results/gap/FINDINGS.md"
MADE = ("calib", "results")
# They hold seconds, process ids, progress bars, and in which order jobs ended: other in every run, and no result.
VOLATILE = ("results/benchmarks/", "results/logs/", "results/ledger/")
# Results that say how fast something was: they have to be there, and are others in every run.
TIMED = ("results/gate/GATE.md", "results/gate/claims.json", "results/gate/rows/*.json", "results/mechanisms/*.json")
TIMED += ("results/kvstore/RESTORE.md", "results/kvstore/restore/*.json")
KEYS = ["cell_id", "window", "position"]  # of a scored token; a table holds each once
KEPT = {".gitignore", ".snakemake_timestamp"}  # hidden files that stay; Snakemake marks folders that it made


@dataclass(frozen=True)
class Job:
    """One job of the workflow: its rule, what it writes, and its log, which no other job has."""

    rule: str
    outputs: tuple[str, ...]
    log: str

    @property
    def benchmark(self) -> str:
        """Where the rule writes seconds and memory."""
        return self.log.replace("results/logs/", "results/benchmarks/").removesuffix(".log") + ".tsv"


STORE = ".kvlab/cells"  # of what was measured before; here each workspace has its own, or nothing would be measured


def surroundings(place):
    """The environment for a run in a workspace, whose store lies in it."""
    return os.environ | {"KVLAB_STORE": str(Path(place).resolve() / STORE)}


def snakemake(place, *arguments):
    """Run Snakemake in a workspace; both streams in one text."""
    command = [BIN / "snakemake", *arguments]
    return subprocess.run(
        command, cwd=place, env=surroundings(place), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def summary(place, target):
    """`snakemake --summary TARGET` as a list of rows, one per planned file; exits when there is no plan."""
    command = [BIN / "snakemake", "--summary", "--", target]
    listed = subprocess.run(command, cwd=place, capture_output=True, text=True)
    lines = [line.split("\t") for line in listed.stdout.splitlines()]
    start = next((number for number, line in enumerate(lines) if line[0] == "output_file"), None)
    if listed.returncode or start is None:
        sys.exit(f"error: no plan for {target} in {place}:\n{listed.stderr.strip()}")
    return [dict(zip(lines[start], line, strict=False)) for line in lines[start + 1 :]]


def planned_jobs(place, target=REPORT):
    """The jobs of a target, whether they are done or not."""
    files = {}
    for row in summary(place, target):
        files.setdefault((row["rule"], row["log-file(s)"]), []).append(row["output_file"])
    return [Job(rule, tuple(paths), log) for (rule, log), paths in files.items()]


def unfinished(place, target=REPORT):
    """Planned files that are not there, or that Snakemake would make again."""
    return [
        f"{row['output_file']}: {row['status']}, {row['plan']}"
        for row in summary(place, target)
        if (row["status"], row["plan"]) != ("ok", "no update")
    ]


def table_hash(table):
    """sha256 of a table's content: names, types, and every value of every row in its order."""
    state = hashlib.sha256(repr(dict(table.schema)).encode())
    state.update(table.write_csv().encode())  # floats are written with all the digits that they need
    return state.hexdigest()


def file_hash(path):
    """sha256 of a file: of its content as a table for parquet, of its bytes for everything else."""
    if path.suffix == ".parquet":
        return table_hash(pl.read_parquet(path))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def made_files(place):
    """Every file under calib/ and results/ of a workspace, relative to it."""
    files = [path for part in MADE for path in (place / part).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(place)) for path in files)


def temporaries(place):
    """Hidden files and folders under calib/ and results/: what a writer began and did not live to rename.

    Its own are called .NAME.PID.tmp; a library that writes beside the target has names of its own.
    """
    found = {path.relative_to(place) for part in MADE for path in (place / part).rglob(".*")}
    return {str(path) for path in found if path.name not in KEPT}


def hashes(place):
    """Hash of every result by its path; logs, benchmarks and hidden files are left out."""
    names = [name for name in made_files(place) if not name.startswith(VOLATILE) and "/." not in name]
    return {name: "timed" if is_timed(name) else file_hash(place / name) for name in names}


def is_timed(name):
    """Whether a result holds measured seconds."""
    return any(fnmatch(name, pattern) for pattern in TIMED)


def differences(before, after):
    """One line for every file that is lost, new, or other than before."""
    lines = [f"lost: {name}" for name in sorted(before.keys() - after.keys())]
    lines += [f"new: {name}" for name in sorted(after.keys() - before.keys())]
    return lines + [f"other: {name}" for name in sorted(before.keys() & after.keys()) if before[name] != after[name]]


def miscounted(tables):
    """What is wrong with the token tables of a workspace, by path: rows twice, or a cell in two tables."""
    lines, owner = [], {}
    for name, table in tables.items():
        twice = len(table) - len(table.unique(KEYS))
        lines += [f"{name}: {twice} rows more than once"] if twice else []
        for cell in table["cell_id"].unique().sort():
            if cell in owner:
                lines.append(f"cell {cell} is in {owner[cell]} and in {name}")
            owner[cell] = name
    return lines


def token_tables(place):
    """Every parquet under results/ that holds scored tokens, by its path."""
    found = {path: pl.read_parquet(place / path) for path in made_files(place) if path.endswith(".parquet")}
    return {path: table for path, table in found.items() if set(KEYS) <= set(table.columns)}
