"""Planted values and what the pipeline makes of them.

A claim waits for its bootstrap: how wide an interval has to be depends on how many there are. Where m values with
intervals are to hold together with 95 %, each is made at 1 - 0.05 / m (Bonferroni; Dunn 1961).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvlab.stats.bootstrap import Bootstrap, Column, Estimate

ROUNDING = 1e-9  # relative; what float64 sums of a million terms may lose


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
    """

    case: str
    name: str
    unit: str
    planted: float
    estimate: Callable[[Bootstrap], Estimate]
    chance: bool = True


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
    """

    name: str
    about: str
    claims: list[Claim]
    facts: dict[str, float] = field(default_factory=dict)


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
    estimate = Estimate(found, low, high, len(means), column.n_tokens, (high - low) / 2, "exact")
    return Claim(case, name, unit, planted, lambda boot: estimate, chance=False)


def up_to(
    case: str, name: str, unit: str, planted: float, found: float, slack: float, n_windows: int = 0, n_tokens: int = 0
) -> Claim:
    """A number that has to be met up to `slack`, which is a rounding and no chance."""
    estimate = Estimate(found, found - slack, found + slack, n_windows, n_tokens, slack, "rounding")
    return Claim(case, name, unit, planted, lambda boot: estimate, chance=False)


def at_least(case: str, name: str, unit: str, bound: float, found: float) -> Claim:
    """A bound that a number has to reach: the interval runs from nothing to what was found."""
    estimate = Estimate(found, 0.0, found, 0, 0, found / 2, "at least")
    return Claim(case, name, unit, bound, lambda boot: estimate, chance=False)
