"""Whether a printed number is the one that the file's own rows give.

Two yardsticks. `equal` asks for equality up to the rounding of the sum: a few units in the last place of the
largest term, in float64, or in float32 where the harness computed in float32. `printed` asks for the same digits at
the precision of the published tables (per cent and nats with two and four decimals).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from validation.published.rows import Check

ULPS = 8  # a mean of 32 terms, then a square root and a division, in either order of summation
PRINTED_DECIMALS = 4  # of a fraction: per cent with two decimals
# Student's 97.5 % point as the study tabulates it, by degrees of freedom; between entries the next lower one is used.
TABULATED_DF = (*range(1, 11), 15, 20, 25, 30, 32, 40, 50, 60, 100)
LARGE_SAMPLE = 1.96  # what it uses beyond the table


def equal(stored: float, ours: float, scale: float, single: bool = False) -> bool:
    """Equality within `ULPS` units in the last place of the larger of `scale` and the numbers.

    Parameters
    ----------
    stored, ours : float
    scale : float
        The largest term that went into the number: rounding is relative to it, not to a sum that cancels.
    single : bool
        The harness computed in float32.
    """
    size = max(abs(stored), abs(ours), abs(scale))
    unit = float(np.spacing(np.float32(size))) if single else math.ulp(size)
    return abs(stored - ours) <= ULPS * unit


def printed(stored: float, ours: float) -> bool:
    """The same digits at the precision of the published tables.

    Numbers that are equal but for their last bit and straddle a rounding edge are the same digits too.
    """
    same = f"{stored:.{PRINTED_DECIMALS}f}" == f"{ours:.{PRINTED_DECIMALS}f}"
    return same or abs(stored - ours) < 10.0 ** -(PRINTED_DECIMALS + 6)


def number(file: str, cell: str, name: str, stored: float, ours: float, scale: float, single: bool = False) -> Check:
    """The check of one number."""
    agrees = equal(stored, ours, scale, single)
    same = printed(stored, ours)
    return Check(file=file, cell=cell, number=name, stored=stored, ours=ours, agrees=agrees, printed=same)


def word(file: str, cell: str, name: str, stored: str, ours: str) -> Check:
    """The check of a word, such as a verdict."""
    same = stored == ours
    return Check(file=file, cell=cell, number=name, stored=stored, ours=ours, agrees=same, printed=same)


def mean(file: str, cell: str, name: str, stored: float, values: Sequence[float]) -> Check:
    """The check of a plain mean of `values`; every harness takes its means in float64."""
    return number(file, cell, name, stored, statistics.fmean(values), max(map(abs, values)))


def is_single(values: Sequence[float]) -> bool:
    """Whether all numbers are float32 numbers: then the harness computed in float32."""
    return all(float(np.float32(value)) == value for value in values)


def tabulated_t(n: int) -> float:
    """The study's critical value for n values: Student's 97.5 % point, three decimals, at the next lower entry."""
    from scipy.special import stdtrit

    df = n - 1
    if df > TABULATED_DF[-1]:
        return LARGE_SAMPLE
    return round(float(stdtrit(max(entry for entry in TABULATED_DF if entry <= df), 0.975)), 3)


def published_half_width(values: Sequence[float]) -> float:
    """The study's 95 % half-width of a mean; 0 for fewer than two values, as its files have it."""
    if len(values) < 2:
        return 0.0
    return tabulated_t(len(values)) * statistics.stdev(values) / math.sqrt(len(values))
