"""BENCH.md of the micro-benchmark, out of what `run` found. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvlab.core.machine import cpu_name
from kvlab.core.records import versions, write_text
from kvlab.output import format as fmt
from kvlab.output.rendering import environment, tidy
from kvlab_mechanisms.micro import timing
from kvlab_mechanisms.micro.row import BenchRow, Wrong, published

TEMPLATES = Path(__file__).parent / "templates"
TIMES = (
    "id",
    "module",
    "operation",
    "shape",
    "ours, us",
    "rival",
    "rival, us",
    "rival / ours",
    "the original here, us",
    "note",
)
NEAR = 0.9  # of the rival's speed
NOT_COMPARABLE = ("r42", "r43")  # the original computes nothing of the kind
FIRST = {
    *("FlashMLACache", "NativeSparseAttention", "FusedSampler", "KVDefragmenter", "DualChunkAttention"),
    *("ActivationOffloader", "AttentionMorpher", "HydraSpecDecoder", "SequenceCompactor", "ParallelSampler"),
    *("ContextSummarizer", "TokenWatermarker", "SchemaGenEngine", "KVMigrator", "SafetyClassifier"),
}
"""Modules of the first half: attention, decoding, and what happens to K and V in memory."""
COUNTS = (
    "modules",
    "published rows that are there",
    "ahead of the original here",
    "as fast as the rival, siblings too",
    "at least 0.9 times as fast",
    "slower, and no reason given",
)
VALUES = ("id", "module", "what", "shape", "ours", "the original here", "note")


def write(found: dict, path: Path) -> None:
    """Write the page; `NonFinite` when a number is NaN or infinite."""
    fmt.refuse_non_finite(found, "micro-benchmark")
    write_text(Path(path), tidy(environment(TEMPLATES).get_template("micro.md.j2").render(context(found))))


def context(found: dict) -> dict:
    """Everything that the template names, as text."""
    rows = found["rows"]
    return {
        "machine": found["machine"],
        "times": fmt.table(TIMES, [_time(row) for row in rows if row["kind"] == "time"]),
        "values": fmt.table(VALUES, [_value(row) for row in rows if row["kind"] == "value"]),
        "failed": [f"{row['id']}: {row['said']}" for row in rows if row["kind"] == "failed"],
        "counts": fmt.table(COUNTS, counts(rows)),
        "not_comparable": " and ".join(NOT_COMPARABLE),
        "missing": ", ".join(sorted(published().keys() - {row["id"].partition("-")[0] for row in rows})),
    }


def counts(rows: list[dict]) -> list[list[str]]:
    """A line for each half of the modules, and one for all: what is there, and what is ahead of what."""
    modules = {row["module"] for row in published().values()}
    halves = [("attention, decoding, memory", FIRST), ("ranks, service, log", modules - FIRST)]
    lines = [_counted(name, [row for row in rows if _published(row)["module"] in half]) for name, half in halves]
    return [*lines, _counted("all", rows)]


def _counted(name: str, rows: list[dict]) -> list[str]:
    there = {row["id"].partition("-")[0] for row in rows}
    timed = [row for row in rows if row["kind"] == "time"]
    known = [row for row in timed if row["id"] in published() and row["id"] not in NOT_COMPARABLE]
    ahead = sum(row["ours_us"] < float(published()[row["id"]]["orig_here"]) for row in known)
    against = [row for row in timed if row["rival_us"] is not None]
    first, near = ([row for row in against if row["ratio"][0] >= least] for least in (1.0, NEAR))
    return [
        name,
        str(len(there)),
        f"{ahead} of {len(known)}",
        f"{len(first)} of {len(against)}",
        f"{len(near)} of {len(against)}",
        ", ".join(row["id"] for row in against if row["ratio"][0] < NEAR and not row["note"]) or "–",
    ]


def _published(row: dict) -> dict[str, str]:
    """What was published of a row, or of the one that it is a sibling of."""
    return published()[row["id"].partition("-")[0]]


def _time(row: dict) -> list[str]:
    seed = _published(row)
    rival = row["rival_us"] is not None
    value, low, high = row["ratio"] if rival else (None, None, None)
    return [
        row["id"],
        seed["module"],
        seed["op"],
        row["shape"],
        fmt.number(row["ours_us"]),
        row["rival"],
        fmt.number(row["rival_us"]) if rival else "–",
        f"{fmt.number(value)} [{fmt.number(low)}, {fmt.number(high)}]" if rival else "–",
        seed["orig_here"] if row["id"] in published() else "–",
        row["note"],
    ]


def _value(row: dict) -> list[str]:
    seed = _published(row)
    orig = seed["orig_here"] if row["id"] in published() else "–"
    return [row["id"], seed["module"], seed["op"], row["shape"], fmt.number(row["value"]), orig, row["note"]]


# Check and time rows, one after the other.


def run(rows: Iterable[BenchRow], rounds: int = timing.ROUNDS) -> dict:
    """What was found: the machine, and by row a time, a number, or why it failed."""
    load = os.getloadavg()[0]
    return {"machine": machine(load), "load": load, "rows": [one(row, rounds) for row in rows]}


def one(row: BenchRow, rounds: int) -> dict[str, Any]:
    """A row, checked first."""
    told = {"id": row.id, "shape": row.shape, "note": row.note, "rival": row.rival_name}
    try:
        row.check()
    except Wrong as error:
        return told | {"kind": "failed", "said": str(error)}
    if row.value is not None:
        return told | {"kind": "value", "value": row.value()}
    tasks = {"ours": row.ours} | ({"rival": row.rival} if row.rival else {})
    taken = timing.timed(tasks, rounds)
    found = told | {"kind": "time", "ours_us": taken["ours"].median, "rival_us": None, "ratio": None}
    if row.rival:
        found |= {"rival_us": taken["rival"].median, "ratio": timing.ratio(taken["rival"], taken["ours"])}
    return found


def machine(load: float) -> str:
    """Processor, versions and load, in one line."""
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions().items()))
    return f"{cpu_name()}, {os.cpu_count()} cores, load {load:.1f} at the start. {named}"
