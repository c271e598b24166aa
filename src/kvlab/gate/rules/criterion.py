"""What a rule is: a function from a row to what is wrong with it, under a number and a name, and what failing it costs.

A criterion is a fact about a row, whatever tier the row claims. Failing it leaves the row a tier at most; a hard one
fails the row at every tier besides, and nobody can waive it: the row contradicts itself or its registry, and is not
merely short of evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvlab.gate.cases import Case
from kvlab.gate.catalogue.columns import TIERS, Tier
from kvlab.gate.reasons import Reason

Finder = Callable[[Case], Iterator[Reason]]


@dataclass(frozen=True)
class Criterion:
    """One thing that a row is held to.

    Parameters
    ----------
    number : int
        1 to 4 are those of the published gate; the others are this one's.
    name : str
        As reports and waivers call it.
    why : str
        What it guards against, in one line.
    ceiling : str
        The best tier that a row can earn which fails it.
    hard : bool
        Whether failing it fails the row at every tier, without waivers.
    find : function
        From a case to the reasons for which it fails; none when it holds.
    of_fields : bool
        Whether it is about the fields as they are written, and so is asked of malformed rows too.
    worse : mapping of str to str
        By code of a reason, a tier below the ceiling that it leaves instead.
    """

    number: int
    name: str
    why: str
    ceiling: Tier
    hard: bool
    find: Finder
    of_fields: bool = False
    worse: Mapping[str, Tier] = field(default_factory=dict)

    def reasons(self, case: Case) -> tuple[Reason, ...]:
        """Why the case fails it, in a fixed order."""
        return tuple(self.find(case))

    def leaves(self, reasons: Iterable[Reason]) -> Tier:
        """The best tier that a row can earn which fails it for these reasons."""
        left = [self.ceiling, *(self.worse[reason.code] for reason in reasons if reason.code in self.worse)]
        return max(left, key=TIERS.index)


def rule(
    number: int, name: str, *, why: str, leaves: Tier, hard: bool = False, **rest
) -> Callable[[Finder], Criterion]:
    """Make a criterion of the function below it; parameters as those of `Criterion`."""
    return lambda find: Criterion(number, name, why, leaves, hard, find, **rest)
