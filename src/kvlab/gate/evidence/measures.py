"""A quality measure with its interval, made from per-item scores; the variant's is paired with the baseline's.

An item is a needle, a question, a window of text. Items are independent of each other, but for windows of one document,
which are told and resampled together. Items that are answered or
not have closed, vectorised intervals that stay honest where no item failed or none changed, where a bootstrap would
claim certainty; all other scores go through the project's bootstrap over items, which is never narrower than
Student's t.

p-values. A measure also holds the ends that its interval has at stricter levels (`LEVELS`), made by the same method
from the same items. The p-value of "the loss is at least the margin" is the smallest of these levels at which the bad
end is inside the margin: a confidence interval and a test are one thing read in two ways (Lehmann & Romano 2005,
Testing Statistical Hypotheses, section 3.5). So p is at most `ALPHA` exactly where the printed interval is inside the
margin, and it is rounded up, by at most the root of two. It is never below the last level, where still two of the
bootstrap's resamples lie beyond the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field
from scipy.special import betaincinv, ndtri, stdtrit

from kvlab.base.errors import MixedIdentity, NonFinite
from kvlab.base.recipe import Frozen
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate

ALPHA = 0.025  # how often either end of an interval may be wrong: the level at which a loss is certified
CONFIDENCE = 1 - 2 * ALPHA  # two-sided
NORMAL = float(ndtri(0.5 + CONFIDENCE / 2))  # 1.96
LEVELS = tuple(ALPHA * 2 ** (-step / 2) for step in range(17))  # of one end, to 1e-4
Count = Annotated[int, Field(ge=0, le=2**53)]  # up to here a float holds every whole number
Ends = Annotated[tuple[float, ...], Field(strict=False)]
BOOTSTRAP = Bootstrap(resamples=20_000, confidence=CONFIDENCE, seed=0)


class Measure(Frozen):
    """A value in its metric's unit, its 95 % interval, its standard error, and the number of items.

    `lows` and `highs` are the ends of its intervals at `LEVELS`, of which the first are `low` and `high`; empty where
    they are not known.
    """

    model_config = ConfigDict(strict=True)

    value: float
    low: float
    high: float
    se: float
    n: Count
    lows: Ends = ()
    highs: Ends = ()

    @classmethod
    def of_estimate(cls, estimate: Estimate) -> Measure:
        """From an interval over windows; the standard error is read off its half-width by Student's t."""
        se = estimate.resolvable / float(stdtrit(max(1, estimate.n_windows - 1), 0.5 + CONFIDENCE / 2))
        return cls(value=estimate.value, low=estimate.low, high=estimate.high, se=se, n=estimate.n_windows)


def measured(
    scores,
    rate: bool | None = None,
    levels: Sequence[float] = LEVELS,
    documents: Sequence[int] | None = None,
) -> Measure:
    """Mean score of items.

    Parameters
    ----------
    scores : float [items]
    rate : bool, optional
        Whether an item is answered or not, 1 or 0, or in part: the mean is a rate with an exact interval. That of
        parts is wide enough: of all scores from 0 to 1 of one mean those of 0 and 1 scatter most. Otherwise it has a
        bootstrap interval, of no width where all scores are equal: right for the kl of a codec that changes
        nothing, wrong for ten questions that were all answered. By default it is a rate if it can be one.
    levels : sequence of float
        At which it has ends: `LEVELS`, or the first of them where no p-value is asked for.
    documents : sequence of int, optional
        The document of every item; those of one are resampled together. No rate has any.

    Raises
    ------
    NonFinite
        When a score is NaN or infinite, there is none, or of a rate it is not between 0 and 1.
    """
    scores = _finite(scores)
    if not _is_rate(rate, scores):
        return _mean(scores, levels, documents)
    n, hits = scores.size, float(scores.sum())
    return _measure(hits / n, rate_bounds(hits, n, np.array(levels)), float(rate_se(hits, n)), n)


def paired(
    variant,
    baseline,
    rate: bool | None = None,
    levels: Sequence[float] = LEVELS,
    documents: Sequence[int] | None = None,
) -> Measure:
    """Mean of `variant` minus `baseline`, item by item.

    Parameters
    ----------
    variant, baseline : float [items]
        Scores of the same items in the same order.
    rate, levels, documents
        As in `measured`.

    Raises
    ------
    MixedIdentity
        When the numbers of items differ.
    NonFinite
        As in `measured`.
    """
    variant, baseline = _finite(variant), _finite(baseline)
    if variant.size != baseline.size:
        raise MixedIdentity({"items": {variant.size, baseline.size}})
    change = variant - baseline
    if not _is_rate(rate, variant, baseline):
        return _mean(change, levels, documents)
    n, gained, lost = change.size, float(change.clip(min=0).sum()), float(-change.clip(max=0).sum())
    ends = change_bounds(gained, lost, n, np.array(levels))
    return _measure((gained - lost) / n, ends, float(change_se(gained, lost, n)), n)


def _is_rate(rate: bool | None, *scores: np.ndarray) -> bool:
    possible = bool(np.isin(scores, (0, 1)).all())
    if rate and not all(((score >= 0) & (score <= 1)).all() for score in scores):
        raise NonFinite("an item of a rate is answered, or not, or in part; its score is from 0 to 1")
    return possible if rate is None else rate


def _finite(scores) -> np.ndarray:
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 1 or not scores.size or not np.isfinite(scores).all():
        raise NonFinite(f"scores must be a row of finite numbers, one per item, not of shape {scores.shape}")
    return scores


def _mean(values: np.ndarray, levels: Sequence[float], documents: Sequence[int] | None) -> Measure:
    items = np.arange(values.size)
    column = Column.of(items, np.zeros_like(items), values, documents)
    at_levels = BOOTSTRAP.mean_at(column, [1 - 2 * level for level in levels])
    ends = np.array([[estimate.low, estimate.high] for estimate in at_levels]).T
    return _measure(at_levels[0].value, ends, standard_error(column.by_document()), values.size)


def standard_error(column: Column) -> float:
    """Of the mean over the items of a column, from how far its windows lie apart."""
    off, n = column.sums - column.sums.sum() / column.counts.sum() * column.counts, len(column.sums)
    return math.sqrt(n / (n - 1) * float((off**2).sum())) / float(column.counts.sum())


def _measure(value: float, ends, se: float, n: int) -> Measure:
    """`ends` float [2, levels]; a stricter interval is never the narrower one, as one of another method may be."""
    lows, highs = np.minimum.accumulate(ends[0]), np.maximum.accumulate(ends[1])
    at = {"lows": tuple(lows.tolist()), "highs": tuple(highs.tolist())} if len(lows) > 1 else {}
    return Measure(value=value, low=float(lows[0]), high=float(highs[0]), se=se, n=n, **at)


# ----------------------------------------------------------------------- scores of 0 and 1


def rate_bounds(hits, n, tail=ALPHA):
    """Exact interval of a rate (Clopper & Pearson 1934), `tail` being the level of each end; all broadcast."""
    hits, n = np.asarray(hits, dtype=np.float64), np.asarray(n, dtype=np.float64)
    low = np.where(hits > 0, betaincinv(np.where(hits > 0, hits, 1), n - hits + 1, tail), 0.0)
    high = np.where(hits < n, betaincinv(hits + 1, np.where(hits < n, n - hits, 1), 1 - tail), 1.0)
    return low, high


def rate_se(hits, n):
    """Standard error of a rate, never less than a 1.96th of how far the exact interval of a rate of 0 reaches.

    The usual error of a rate of 0 or 1 is 0, which no finite number of items shows.
    """
    rate = np.asarray(hits, dtype=np.float64) / n
    return np.sqrt(np.maximum(rate * (1 - rate) / n, (rate_bounds(0, n)[1] / NORMAL) ** 2))


def change_bounds(gained, lost, n, tail=ALPHA):
    r"""Interval of the rate of gained minus that of lost items, from the exact intervals of both.

    .. math:: L = d - \sqrt{a^2 + b^2 - 2 r a b}, \quad a = \hat p_g - l_g, \quad b = u_l - \hat p_l

    and the mirror image for U (the method of variance estimates recovery, Zou & Donner 2008, Statistics in
    Medicine 27:1693), with the correlation of two cells of a multinomial,
    :math:`r = -\sqrt{p_g p_l / ((1 - p_g)(1 - p_l))}`. Items that did not change count only through n: that is
    what pairing gains.
    """
    gained, lost = np.asarray(gained, dtype=np.float64), np.asarray(lost, dtype=np.float64)
    up, down = gained / n, lost / n
    with np.errstate(divide="ignore", invalid="ignore"):
        r = -np.nan_to_num(np.sqrt(up * down / ((1 - up) * (1 - down))), nan=0.0, posinf=0.0)
    (up_low, up_high), (down_low, down_high) = rate_bounds(gained, n, tail), rate_bounds(lost, n, tail)

    def side(a, b):
        return np.sqrt(a**2 + b**2 - 2 * r * a * b)

    low = up - down - side(up - up_low, down_high - down)
    high = up - down + side(up_high - up, down - down_low)
    return np.maximum(low, -1.0), np.minimum(high, 1.0)


def change_se(gained, lost, n):
    """Standard error of a paired change, one gained and one lost item added (Bonett & Price 2012)."""
    up, down = (np.asarray(gained, dtype=np.float64) + 1) / (n + 2), (np.asarray(lost, dtype=np.float64) + 1) / (n + 2)
    return np.sqrt((up + down - (up - down) ** 2) / (n + 2))
