"""The criteria that a row is held to: the four published rules by their numbers and names, and what they were blind to.

| rule | file |
|---|---|
| 1, 2, 4 as published; 0, 5 to 8, 16, 20 | `declared.py`: what a row declares, held against catalogue and registry |
| 3 as published; 13 to 15, 18, 19 | `shown.py`: what its evidence shows |
| 9, 10, 21 | `ran.py`: what really ran, held against what was declared |
| 11, 22 | `counted.py`: its numbers among themselves |
| 12, 17 | `derived.py`, with `counts.py`: its numbers, held against its evidence |
"""

from __future__ import annotations

from kvlab.gate.cases import Case, Context
from kvlab.gate.rules import counted, declared, derived, ran, shown
from kvlab.gate.rules.criterion import Criterion
from kvlab.gate.rules.shown import FALSEHOODS

__all__ = ["CRITERIA", "FALSEHOODS", "PUBLISHED", "WAIVABLE", "Case", "Context", "Criterion"]

PARTS = (declared, shown, ran, counted, derived)
CRITERIA: tuple[Criterion, ...] = tuple(
    sorted(
        (
            one
            for part in (declared, shown, ran, counted, derived)
            for one in vars(part).values()
            if isinstance(one, Criterion)
        ),
        key=lambda one: one.number,
    )
)
"""In the order of reports."""
PUBLISHED = tuple(criterion.name for criterion in CRITERIA if 1 <= criterion.number <= 4)
WAIVABLE = tuple(criterion.name for criterion in CRITERIA if not criterion.hard)
