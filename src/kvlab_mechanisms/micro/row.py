"""What a row of the micro-benchmark is, and what was published for it."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from kvlab.core.errors import Fault

SEED_ROWS = Path(__file__).with_name("seed_rows.csv")


class Wrong(Fault):
    """An operation does not do what it should; it is not timed."""

    code = "micro"


def hold(condition: bool, said: str = "the check does not hold") -> None:
    """`Wrong` unless the condition holds."""
    if not condition:
        raise Wrong(said)


def named(module: str, package: str) -> str:
    """A library that is no part of this project's environment, with its version; empty where it is not installed."""
    return f"{package} {version(package)}" if find_spec(module) else ""


@dataclass(frozen=True)
class BenchRow:
    """An operation of ours, and a library's that does the same work on the same input.

    Parameters
    ----------
    id : str
        Of `seed_rows.csv`; a sibling at another size has it before a dash: ``r02-4096``.
    shape : str
        Of the input, as it is.
    ours : callable
    check : callable
        Calls `hold` with what ours should do on this very input; nothing is timed before.
    rival : callable or None
    rival_name : str
        The library, or why there is none.
    note : str
        What a reader has to know of the row.
    value : callable or None
        For rows that are no time: the number. `ours` is not timed then.
    """

    id: str
    shape: str
    check: Callable[[], None]
    ours: Callable[[], object] | None = None
    rival: Callable[[], object] | None = None
    rival_name: str = ""
    note: str = ""
    value: Callable[[], float] | None = None

    @property
    def seed(self) -> str:
        """The id in `seed_rows.csv` that the row belongs to."""
        return self.id.partition("-")[0]


@cache
def published() -> dict[str, dict[str, str]]:
    """What was published of each row, by id: module, op, figure, unit, label, what really ran, and its time here.

    The page is squishai/squish's ``docs/benchmark_wave25_26.md``; ``orig_here`` is its code at commit 59886eb on two
    cores of an EPYC with one thread.
    """
    with SEED_ROWS.open() as file:
        return {row["id"]: row for row in csv.DictReader(file)}
