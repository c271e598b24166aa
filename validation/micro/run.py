"""Check and time rows, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from kvlab.base.records import versions
from validation.bench.run import cpu_name
from validation.micro import timing
from validation.micro.row import Row, Wrong


def run(rows: Iterable[Row], rounds: int = timing.ROUNDS) -> dict:
    """What was found: the machine, and by row a time, a number, or why it failed."""
    load = os.getloadavg()[0]
    return {"machine": machine(load), "load": load, "rows": [one(row, rounds) for row in rows]}


def one(row: Row, rounds: int) -> dict[str, Any]:
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
