"""Whether an effect is shown to be nothing that matters: an equivalence test, with "open" where it is not decided.

That an interval holds zero shows nothing: the fewer the windows, the easier. Two one-sided tests do (Schuirmann 1987,
Journal of Pharmacokinetics and Biopharmaceutics 15:657): the effect is equivalent to none at level alpha when its
1 - 2 alpha interval lies wholly inside the margin. Here the interval is the report's own, of 95 % as a rule, so each
of the two tests is at 2.5 % where 5 % is usual: stricter, and the interval that is printed is the one that decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import NormalDist
from typing import Literal

from kvlab.core.errors import Fault
from kvlab.stats.bootstrap import Estimate
from kvlab.stats.power import POWER, power_factor, windows_for_sign, windows_needed

State = Literal["equivalent", "open", "differ"]
_NORMAL = NormalDist()
_HALVINGS = 60  # of a ratio of standard errors; more than a float64 holds


def within(estimate: Estimate, margin: float) -> State:
    """``equivalent`` with the whole interval inside ``+-margin``, ``differ`` with all of it outside, else ``open``.

    An end that lies on the margin is not inside it, and not outside.
    """
    if not margin > 0:
        raise Fault(f"an equivalence margin must be above 0, not {margin}", code="fault.margin")
    if -margin < estimate.low and estimate.high < margin:
        return "equivalent"
    return "differ" if estimate.low > margin or estimate.high < -margin else "open"


def below_one(estimates: Iterable[Estimate]) -> State:
    """Whether some quantity is below one bound at least, from its differences to them.

    ``equivalent`` when one of the differences is wholly below zero, ``differ`` when all are wholly above it. As one
    suffices, each of n differences needs an interval of an n-th of the error (Bonferroni).
    """
    estimates = list(estimates)
    if any(one.high < 0 for one in estimates):
        return "equivalent"
    return "differ" if all(one.low > 0 for one in estimates) else "open"


def all_of(states: Iterable[State]) -> State:
    """What several tests that must all pass say together.

    No correction for their number is due: together they pass no more often than the one that is least likely to
    (intersection-union test; Berger & Hsu 1996, Statistical Science 11:283, theorem 1).
    """
    found = set(states)
    return "differ" if "differ" in found else "open" if "open" in found else "equivalent"


def windows_within(estimate: Estimate, margin: float, power: float = POWER) -> int | None:
    r"""Windows at which `within` is not open with a power, were the effect what was found; its own when it is not.

    Inside the margin both ends must come in. With k the margin's half width in standard errors the probability is
    :math:`\Phi((m - v)/se - z) + \Phi((m + v)/se - z) - 1` (Julious 2004, Statistics in Medicine 23:1921, section 4),
    which grows with the number of windows, so the smallest is found by halving. None where the value lies on the
    margin: no number of windows settles that.
    """
    n, value = estimate.n_windows, abs(estimate.value)
    if within(estimate, margin) != "open":
        return n
    half = (estimate.high - estimate.low) / 2
    if value >= margin:
        return windows_needed(half, value - margin, n, power_factor(estimate.confidence, power))
    edge = _NORMAL.inv_cdf(0.5 + estimate.confidence / 2)

    def chance(per_se: float) -> float:
        ends = (_NORMAL.cdf(per_se * room - edge) for room in (margin - value, margin + value))
        return sum(ends) - 1

    low, high = 0.0, 1.0
    while chance(high / margin) < power:
        high *= 2
        if high > 1e9:
            return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if chance(middle / margin) >= power else (middle, high)
    # The standard error that this needs is margin / high; the observed one is half / edge.
    return windows_needed(half / edge, margin / high, n)


def windows_below_one(estimates: Iterable[Estimate], power: float = POWER) -> int | None:
    """Windows at which `below_one` is not open with a power, were the differences what was found."""
    estimates = list(estimates)
    if below_one(estimates) != "open":
        return estimates[0].n_windows
    passing = [windows_for_sign(one, power) for one in estimates if one.value < 0]
    if passing:
        return min((count for count in passing if count is not None), default=None)
    failing = [windows_for_sign(one, power) for one in estimates]
    return None if None in failing else max(failing)
