"""A quality measure with its interval, made from per-item scores; the variant's is paired with the baseline's.

An item is a needle, a question, a window of text. Items are independent of each other, but for windows of one document,
which are told and resampled together. Items that are answered or not have closed, vectorised intervals that stay honest
where no item failed or none changed, where a bootstrap would claim certainty; all other scores go through the project's
bootstrap over items, which is never narrower than Student's t.

p-values. The p-value of "the loss is at least the margin" is the smallest of `LEVELS` at which the bad end is inside
the margin: a confidence bound and a test are one thing read in two ways (Lehmann & Romano 2005, Testing Statistical
Hypotheses, section 3.5). It is rounded up, by at most the root of two. The ends of a rate follow from its counts, at
any level. Those of a mean are bounds that hold for skewed items too (`kvlab.stats.skewed`), down to the level that its
items carry (`carried`); they are wider than the printed interval, which is that of the studies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field
from scipy.special import betaincinv, ndtri

from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import MixedIdentity, NonFinite
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.stats.skewed import upper_means

ALPHA = 0.025  # how often either end of an interval may be wrong: the level at which a loss is certified
CONFIDENCE = 1 - 2 * ALPHA  # two-sided
NORMAL = float(ndtri(0.5 + CONFIDENCE / 2))  # 1.96
LEVELS = tuple(ALPHA * 2 ** (-step / 2) for step in range(41))  # of one end, to 2e-8
FEWEST = 32  # items by whose mean anything is certified
Count = Annotated[int, Field(ge=0, le=2**53)]  # up to here a float holds every whole number
Ends = Annotated[tuple[float, ...], Field(strict=False)]
BOOTSTRAP = Bootstrap(resamples=20_000, confidence=CONFIDENCE, seed=0)


class Measure(Frozen):
    """A value in its metric's unit, its 95 % interval, its standard error, and the number of items.

    `lows` and `highs` are bounds of a mean at the first of `LEVELS`, by which it is certified: no nearer than `low` and
    `high`. Empty of a rate, whose ends follow from its counts, and of so few items that nothing is certified by them.
    `gained` and `lost` are of a change of a rate: the sums of what items gained and lost.
    """

    model_config = ConfigDict(strict=True)

    value: float
    low: float
    high: float
    se: float
    n: Count
    lows: Ends = ()
    highs: Ends = ()
    gained: float | None = None
    lost: float | None = None


def measured(
    scores,
    rate: bool | None = None,
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
    documents : sequence of int, optional
        The document of every item; those of one are resampled together. No rate has any.

    Raises
    ------
    NonFinite
        When a score is NaN or infinite, there is none, or of a rate it is not between 0 and 1.
    """
    scores = _finite(scores)
    return rate_of(float(scores.sum()), scores.size) if _is_rate(rate, scores) else _mean(scores, documents)


def paired(
    variant,
    baseline,
    rate: bool | None = None,
    documents: Sequence[int] | None = None,
) -> Measure:
    """Mean of `variant` minus `baseline`, item by item.

    Parameters
    ----------
    variant, baseline : float [items]
        Scores of the same items in the same order.
    rate, documents
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
        return _mean(change, documents)
    return change_of(float(change.clip(min=0).sum()), float(-change.clip(max=0).sum()), change.size)


def _is_rate(rate: bool | None, *scores: np.ndarray) -> bool:
    possible = bool(np.isin(scores, (0, 1)).all())
    if rate and not all(((score >= 0) & (score <= 1)).all() for score in scores):
        raise NonFinite(
            "an item of a rate is answered, or not, or in part; its score is from 0 to 1", code="non-finite.rate"
        )
    return possible if rate is None else rate


def _finite(scores) -> np.ndarray:
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 1 or not scores.size or not np.isfinite(scores).all():
        raise NonFinite(
            f"scores must be a row of finite numbers, one per item, not of shape {scores.shape}",
            code="non-finite.scores",
        )
    return scores


def carried(n: int) -> tuple[float, ...]:
    """The levels that a mean over n independent items carries: down to 25 / n^2, and none below `FEWEST` items.

    A bound at a level says how often it is too low, and reads that off the tail of n items. What is rarer than one item
    in n has left no trace there, and a skewed tail that is not seen moves the mean at the order of 1 / n (the Edgeworth
    expansion's first term; Hall 1992, The Bootstrap and Edgeworth Expansion, section 2.3), so a level far below its
    square is an extrapolation. Where it ends was found on windows that were measured (`validation.gate_error`).
    """
    return tuple(level for level in LEVELS if n >= FEWEST and level * n**2 >= 25)


def _mean(values: np.ndarray, documents: Sequence[int] | None) -> Measure:
    items = np.arange(values.size)
    column = Column.of(items, np.zeros_like(items), values, documents)
    clusters, found = column.by_document(), BOOTSTRAP.mean(column)
    low, high, levels = found.low, found.high, carried(len(clusters.sums))
    if levels and np.ptp(clusters.means):
        lows = tuple(np.minimum(low, -upper_means(-clusters.means, levels)).tolist())
        highs = tuple(np.maximum(high, upper_means(clusters.means, levels)).tolist())
    else:
        lows, highs = (low,) * len(levels), (high,) * len(levels)
    return Measure(
        value=found.value, low=low, high=high, se=standard_error(clusters), n=values.size, lows=lows, highs=highs
    )


def standard_error(column: Column) -> float:
    """Of the mean over the items of a column, from how far its windows lie apart."""
    off, n = column.sums - column.sums.sum() / column.counts.sum() * column.counts, len(column.sums)
    return math.sqrt(n / (n - 1) * float((off**2).sum())) / float(column.counts.sum())


# ----------------------------------------------------------------------- scores of 0 and 1


def rate_of(hits: float, n: int) -> Measure:
    """The rate of `hits` among n items, with its exact interval."""
    low, high = rate_bounds(hits, n)
    return Measure(value=hits / n, low=float(low), high=float(high), se=float(rate_se(hits, n)), n=n)


def change_of(gained: float, lost: float, n: int) -> Measure:
    """The change of a rate over n items, with the interval of `change_bounds`."""
    low, high = change_bounds(gained, lost, n)
    value, se = (gained - lost) / n, float(change_se(gained, lost, n))
    return Measure(value=value, low=float(low), high=float(high), se=se, n=n, gained=gained, lost=lost)


def bounds_of(measure: Measure, levels=(ALPHA,)) -> tuple[np.ndarray, np.ndarray]:
    """The ends of a rate, or of its change, at each level, from its counts alone: float64 [levels] each."""
    tails = np.asarray(levels)
    if measure.gained is None or measure.lost is None:
        return rate_bounds(np.full(tails.shape, measure.value * measure.n), measure.n, tails)
    return change_bounds(np.full(tails.shape, measure.gained), measure.lost, measure.n, tails)


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
