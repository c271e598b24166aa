"""How sure a certification is among all rows that were tested with it: Holm's adjustment of their p-values.

A row is tested where evidence is attached to it, whatever it claims and whatever is wrong with the evidence: leaving
out of the count what did not come well would be choosing by the outcome. Its p-value is the largest of its metrics'
(`Derived.p`). Where every row is as bad as a margin allows, one of many is certified by luck far more often than each
by itself; after the adjustment the chance that any row is certified wrongly is at most `ALPHA`, whatever the rows
have in common, such as items and baseline (Holm 1979, Scandinavian Journal of Statistics 6:65).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvlab.gate.evidence.measures import ALPHA
from kvlab.gate.reasons import Reason
from kvlab.stats.multiple import holm


class Standing(NamedTuple):
    """A row's p-value, the same adjusted, and over how many rows that were tested."""

    p: float
    adjusted: float
    tested: int

    @property
    def certifies(self) -> bool:
        """Whether the row may be certified among the others."""
        return self.adjusted <= ALPHA

    def reason(self) -> Reason:
        """Why it may not."""
        said = f"{self.p:.2g} is {self.adjusted:.2g} among {self.tested} rows tested (Holm), allowed is {ALPHA:g}"
        return Reason(code="quality_family", field="p", said=said)


def standings(p_values: Sequence[float | None]) -> list[Standing | None]:
    """Each row's standing among all; None where a row is not tested and so has no p-value."""
    tested = [p for p in p_values if p is not None]
    adjusted = iter(holm(tested).tolist())
    return [None if p is None else Standing(p, next(adjusted), len(tested)) for p in p_values]
