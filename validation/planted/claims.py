"""Planted values and what the pipeline makes of them.

A claim waits for its bootstrap: how wide an interval has to be depends on how many there are. Where m values with
intervals are to hold together with 95 %, each is made at 1 - 0.05 / m (Bonferroni; Dunn 1961).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from scipy.stats import binom

from kvlab.stats.bootstrap import Bootstrap, Column, Estimate

ROUNDING = 1e-9  # relative; what float64 sums of a million terms may lose
ALL = "all"
TOO_FEW = 1e-3  # chance of as few values inside their intervals, at which a path fails


@dataclass(frozen=True)
class Claim:
    """One planted value.

    Parameters
    ----------
    case, name, unit : str
    planted : float
        The known truth.
    estimate : callable
        What the pipeline finds, with the interval of a given bootstrap.
    chance : bool
        False where the interval is no statement of probability: the value has to be met exactly, or up to rounding.
    path : str
        What of the pipeline the value went through; that of its case if none is named.
    """

    case: str
    name: str
    unit: str
    planted: float
    estimate: Callable[[Bootstrap], Estimate]
    chance: bool = True
    path: str = ""


@dataclass(frozen=True)
class Case:
    """A case of planted truth.

    Parameters
    ----------
    name, about : str
        What is planted, and in a sentence how.
    claims : list of Claim
    facts : dict of str to float
        What was measured about the planting itself.
    path : str
        What of the pipeline its values go through.
    """

    name: str
    about: str
    claims: list[Claim]
    facts: dict[str, float] = field(default_factory=dict)
    path: str = "transformers, float32, in memory"


@dataclass(frozen=True)
class Recovered:
    """A claim with its estimate.

    `alone` says whether the planted value also lies inside the interval that the same value would be reported
    with alone, at the confidence of ``stats.confidence``.
    """

    claim: Claim
    estimate: Estimate
    alone: bool

    @property
    def holds(self) -> bool:
        """Whether the planted value lies inside the interval, its ends included."""
        return contains(self.estimate, self.claim.planted)

    def to_json(self) -> dict:
        """Everything but the function."""
        return {
            "case": self.claim.case,
            "name": self.claim.name,
            "unit": self.claim.unit,
            "planted": float(self.claim.planted),
            "chance": self.claim.chance,
            "estimate": self.estimate.to_json(),
            "holds": self.holds,
            "alone": self.alone,
        }


def contains(estimate: Estimate, value: float) -> bool:
    """Whether a value lies inside an interval, its ends included."""
    return bool(estimate.low <= value <= estimate.high)


def contained(found: Sequence[tuple[str, bool]], confidence: float) -> list[dict]:
    """How many planted values lie inside their plain intervals, by path and, under the name ``all``, in sum.

    Were intervals independent and each right with probability `confidence`, the count would be binomial. `expected`
    is the central 95 % of that; a path fails where a count as low has a chance below `TOO_FEW`.

    Parameters
    ----------
    found : sequence of (str, bool)
        The path of each value, and whether its plain interval holds it.
    confidence : float
        Of the intervals.
    """
    entries = []
    for name in [*dict.fromkeys(path for path, _ in found), ALL]:
        inside = [held for path, held in found if name in (path, ALL)]
        n, k = len(inside), sum(inside)
        expected = [int(end) for end in binom.interval(0.95, n, confidence)]
        holds = bool(binom.cdf(k, n, confidence) >= TOO_FEW)
        entries.append({"path": name, "values": n, "inside": k, "expected": expected, "holds": holds})
    return entries


def together(boot: Bootstrap, claims: Sequence[Claim]) -> Bootstrap:
    """The bootstrap whose intervals hold for all claims together with ``boot.confidence``."""
    count = max(1, sum(claim.chance for claim in claims))
    return replace(boot, confidence=1 - (1 - boot.confidence) / count)


def recover(boot: Bootstrap, claims: Sequence[Claim]) -> list[Recovered]:
    """Every claim's estimate, its interval wide enough for all of them together."""
    joint = together(boot, claims)
    return [Recovered(c, c.estimate(joint), contains(c.estimate(boot), c.planted)) for c in claims]


def exactly(case: str, name: str, unit: str, planted: float, column: Column) -> Claim:
    """A mean that has to be met in every token: the interval runs from the least window mean to the largest."""
    means = column.means
    found = float(column.sums.sum() / column.counts.sum())
    low, high = float(means.min()), float(means.max())
    estimate = Estimate(found, low, high, len(means), column.n_tokens, "exact")
    return Claim(case, name, unit, planted, lambda boot: estimate, chance=False)


def up_to(
    case: str, name: str, unit: str, planted: float, found: float, slack: float, n_windows: int = 0, n_tokens: int = 0
) -> Claim:
    """A number that has to be met up to `slack`, which is a rounding and no chance."""
    estimate = Estimate(found, found - slack, found + slack, n_windows, n_tokens, "rounding")
    return Claim(case, name, unit, planted, lambda boot: estimate, chance=False)


def at_least(case: str, name: str, unit: str, bound: float, found: float) -> Claim:
    """A bound that a number has to reach: the interval runs from nothing to what was found."""
    estimate = Estimate(found, 0.0, found, 0, 0, "at least")
    return Claim(case, name, unit, bound, lambda boot: estimate, chance=False)
