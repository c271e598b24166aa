"""How sure a certification is among all rows that were tested with it: Holm's adjustment of their p-values.

A row is tested where evidence is attached to it, whatever it claims and whatever is wrong with the evidence: leaving
out of the count what did not come well would be choosing by the outcome. For the same reason the count is not that of
the rows in a file, but of the variants that their runs tested (`Family` of the evidence). Those that are not there
count as tests that failed, which is the most that they can cost the others.

A row's p-value is the largest of its metrics' (`Derived.p`). Where every row is as bad as a margin allows, one of many
is certified by luck far more often than each by itself; after the adjustment the chance that any row is certified
wrongly is at most `ALPHA`, whatever the rows have in common, such as items and baseline (Holm 1979, Scandinavian
Journal of Statistics 6:65).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvlab.gate.evidence.measures import ALPHA
from kvlab.gate.evidence.record import Family
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


def standings(p_values: Sequence[float | None], families: Iterable[Family]) -> list[Standing | None]:
    """Each row's standing among all; None where a row is not tested and so has no p-value.

    Parameters
    ----------
    p_values : sequence of float or None
    families : iterable of Family
        Of all evidence of these rows.
    """
    tested = [p for p in p_values if p is not None]
    runs: dict[str, int] = {}
    for family in families:
        runs[family.run] = max(family.tested, runs.get(family.run, 0))
    absent = max(0, sum(runs.values()) - len(tested))
    adjusted = iter(holm([*tested, *[1.0] * absent]).tolist())
    total = len(tested) + absent
    return [None if p is None else Standing(p, next(adjusted), total) for p in p_values]
