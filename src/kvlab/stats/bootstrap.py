"""Clustered, paired bootstrap: windows are drawn with replacement, tokens follow their window.

Tokens of one window share a text, so they are not independent and windows are the clusters (Davison &
Hinkley 1997, section 3.8). Windows of one document share it too: where the documents are known, these are
the clusters, and a document is drawn with all its windows. Every statistic is a function of column means; a
resample of clusters is a row of counts, so all resampled means are one matrix product. The counts depend on
nothing but (number of clusters, resamples, seed): whatever is estimated over the same windows is resampled
alike, which is what pairs two cells.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from pydantic import ConfigDict
from scipy.special import stdtrit

from kvlab.core.errors import Fault, MixedIdentity, NonFinite

FEWEST_FOR_BCA = 8
USUAL_CONFIDENCE = 0.95
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Estimate:
    """A value with its two-sided interval: the one class of it, here, in every record and in `metrics.json`.

    `method` names how the interval was made: ``bca`` (never inside the t interval), ``t``
    (too few windows for a bootstrap), ``percentile`` (no scatter, or BCa undefined) or ``exact`` (a rate
    of 0 or 1). `confidence` is the interval's, two-sided. `n_documents` is how many documents the windows are of,
    which then are what is resampled; None where every window stands for itself.

    Raises
    ------
    ValueError
        The value lies outside its own interval, by more than rounding. In a record pydantic says where.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    value: float
    low: float
    high: float
    n_windows: int
    n_tokens: int
    method: str
    confidence: float = USUAL_CONFIDENCE
    n_documents: int | None = None

    def __post_init__(self) -> None:
        room = 1e-9 * (1 + abs(self.value))
        if not self.low - room <= self.value <= self.high + room:
            raise ValueError(f"value {self.value:g} is outside its own interval, {self.low:g} to {self.high:g}")

    @property
    def resolvable(self) -> float:
        """Half the interval's width: the smallest absolute effect that this many windows can tell from zero."""
        return (self.high - self.low) / 2

    def within(self, lowest: float, highest: float) -> Estimate:
        """The same with its interval cut to what the quantity can be."""
        return replace(self, low=max(self.low, lowest), high=min(self.high, highest))

    def to_json(self) -> dict:
        """The fields as a plain dict."""
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class Column:
    """One quantity of one cell, summed per window.

    Parameters
    ----------
    sums, counts : float64 [windows]
        Sum of the quantity and number of terms, by window.
    windows : tuple of int
        The windows, ascending.
    key : str
        Digest of every (window, position); two columns are paired when their keys are equal.
    n_tokens : int
        Tokens that the sums are over.
    documents : tuple of int, optional
        Which document each window is of. None where that is not known, or every window is of its own.
    """

    sums: np.ndarray
    counts: np.ndarray
    windows: tuple[int, ...]
    key: str
    n_tokens: int
    documents: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, window: np.ndarray, position: np.ndarray, values: np.ndarray, documents: Sequence[int] | None = None
    ) -> Column:
        """Sum `values` [tokens] by `window` [tokens]; rows may come in any order.

        Parameters
        ----------
        documents : sequence of int, optional
            The document of every window, by the window's number.

        Raises
        ------
        NonFinite
            When a value is NaN or infinite.
        Fault
            When a window's document is not among `documents`.
        """
        values = np.asarray(values, dtype=np.float64)
        wrong = values.size - int(np.isfinite(values).sum())
        if wrong or not values.size:
            raise NonFinite(
                f"{wrong} of {values.size} values are NaN or infinite; at least one is needed", code="non-finite.values"
            )
        rows = np.stack([np.asarray(window, np.int64), np.asarray(position, np.int64)], axis=1)
        key = hashlib.sha256(rows[np.lexsort(rows.T[::-1])].tobytes()).hexdigest()
        windows, index = np.unique(rows[:, 0], return_inverse=True)
        counts = np.bincount(index).astype(np.float64)
        sums, numbers = np.bincount(index, weights=values), tuple(windows.tolist())
        return cls(sums, counts, numbers, key, values.size, documents_of(numbers, documents))

    def by_document(self) -> Column:
        """The same summed by document; itself where every window is of its own.

        Where all windows are of one document they stay apart: what is found then holds for that document alone.
        """
        if self.documents is None or len(set(self.documents)) in (1, len(self.windows)):
            return self
        numbers, index = np.unique(self.documents, return_inverse=True)
        sums, counts = (np.bincount(index, weights=part) for part in (self.sums, self.counts))
        return Column(sums, counts, tuple(numbers.tolist()), self.key, self.n_tokens)

    @property
    def means(self) -> np.ndarray:
        """Mean of each window, float64 [windows]."""
        return self.sums / self.counts

    def of_windows(self, windows: Collection[int]) -> Column:
        """The same quantity of some of its windows; paired with another column's if those are paired."""
        chosen = np.isin(self.windows, list(windows))
        kept, counts = tuple(np.array(self.windows)[chosen].tolist()), self.counts[chosen]
        documents = None if self.documents is None else tuple(np.array(self.documents)[chosen].tolist())
        return Column(self.sums[chosen], counts, kept, f"{self.key} {kept}", round(counts.sum()), documents)

    def per_window(self, function: Callable[[np.ndarray], np.ndarray]) -> Column:
        """`function` of each window's mean, every window counting once (an unweighted mean of windows)."""
        values = function(self.means)
        return Column(values, np.ones_like(values), self.windows, self.key, self.n_tokens, self.documents)


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made: number of resamples, two-sided confidence, seed."""

    resamples: int
    confidence: float
    seed: int

    def mean(self, column: Column) -> Estimate:
        """Mean over tokens."""
        return self.combine([column], lambda m: m[..., 0])

    def divergence(self, column: Column) -> Estimate:
        """`mean` of a quantity that is nowhere below zero, such as KL; nor is its interval."""
        return self.mean(column).within(0.0, np.inf)

    def mean_at(self, column: Column, confidences: Sequence[float]) -> list[Estimate]:
        """`mean` at each of several confidences instead of its own, over the same resamples."""
        return [found for (found,) in self._combined([column], lambda m: m, confidences)]

    def rate(self, column: Column) -> Estimate:
        """Mean of a column of zeros and ones.

        When all are equal no resample differs and a bootstrap would claim certainty; the interval then
        is the exact binomial one over the tokens (Clopper & Pearson 1934), method ``exact``. It takes
        tokens as independent, because without an event no design effect can be estimated; over windows it would be
        far wider than what the bootstrap finds of a single event.
        """
        found = self.mean(column)
        if found.value not in (0.0, 1.0):
            return found.within(0.0, 1.0)
        bound = 1 - ((1 - self.confidence) / 2) ** (1 / column.n_tokens)
        low, high = (0.0, bound) if found.value == 0 else (1 - bound, 1.0)
        return replace(found, low=low, high=high, method="exact")

    def exp_mean(self, column: Column) -> Estimate:
        """exp of the mean over tokens; of delta_nll this is ppl_ratio."""
        return self.combine([column], lambda m: np.exp(m[..., 0]))

    def difference(self, a: Column, b: Column) -> Estimate:
        """Mean of `a` minus mean of `b`, paired by window and position."""
        return self.combine([a, b], lambda m: m[..., 0] - m[..., 1])

    def ratio(self, a: Column, b: Column) -> Estimate:
        """Mean of `a` over mean of `b`, paired; `NonFinite` when the denominator can be zero."""
        return self.combine([a, b], lambda m: m[..., 0] / m[..., 1])

    def combine(self, columns: Sequence[Column], statistic: Callable[[np.ndarray], np.ndarray]) -> Estimate:
        """`statistic` of the columns' means.

        Parameters
        ----------
        columns : sequence of Column
            Paired: over the same windows and positions, of the same documents.
        statistic : callable
            Takes means [..., columns], returns [...]; vectorised over the leading axes.

        Raises
        ------
        MixedIdentity
            When the columns are not paired.
        NonFinite
            When the statistic is not finite for the data or for a resample.
        """
        return self.combine_many(columns, lambda m: statistic(m)[..., None])[0]

    def combine_many(self, columns: Sequence[Column], statistic: Callable[[np.ndarray], np.ndarray]) -> list[Estimate]:
        """Several statistics at once: `statistic` returns [..., statistics]; as `combine` otherwise."""
        return self._combined(columns, statistic, [self.confidence])[0]

    def _combined(self, columns, statistic, confidences: Sequence[float]) -> list[list[Estimate]]:
        """By confidence, the estimate of each statistic."""
        refuse_unpaired(columns)
        clusters = [column.by_document() for column in columns]
        sums = np.stack([column.sums for column in clusters], axis=1)
        counts = np.stack([column.counts for column in clusters], axis=1)
        n = len(sums)
        if n < 2:
            raise Fault("an interval over windows needs at least 2 windows", code="fault.too-few-windows")
        first = columns[0]
        known = set(first.documents or ())
        documents = len(known) if len(known) > 1 else None  # windows of a single one are what is resampled
        drawn = resample_counts(n, self.resamples, self.seed)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            value = statistic(sums.sum(0) / counts.sum(0))
            jackknife = statistic((sums.sum(0) - sums) / (counts.sum(0) - counts))
            resampled = statistic((drawn @ sums) / (drawn @ counts))
        for part in (value, jackknife, resampled):
            if not np.isfinite(part).all():
                raise NonFinite(
                    f"a statistic over {n} windows is not finite (a denominator near zero?)",
                    code="non-finite.statistic",
                )
        parts = [(float(value[i]), resampled[:, i], jackknife[:, i]) for i in range(value.shape[-1])]
        sizes = len(first.windows), first.n_tokens, documents
        return [[_estimate(*part, confidence, *sizes) for part in parts] for confidence in confidences]


def _estimate(value, resampled, jackknife, confidence, n_windows, n_tokens, n_documents) -> Estimate:
    low, high, method = interval(value, resampled, jackknife, confidence)
    return Estimate(value, low, high, n_windows, n_tokens, method, confidence, n_documents)


def refuse_unpaired(columns: Sequence[Column]) -> None:
    """`MixedIdentity` unless all columns cover the same windows and positions."""
    if len({column.key for column in columns}) > 1:
        seen = [f"{c.n_tokens} tokens of windows {c.windows[0]}..{c.windows[-1]} ({c.key[:8]})" for c in columns]
        raise MixedIdentity({"scored windows and positions": set(seen)})
    if len(given := {column.documents for column in columns}) > 1:
        raise MixedIdentity({"documents of the scored windows": set(map(str, given))})


def documents_of(windows: Sequence[int], documents: Sequence[int] | None) -> tuple[int, ...] | None:
    """The document of each window, from those of all by number; None without them."""
    if documents is None:
        return None
    if windows[-1] >= len(documents):
        raise Fault(
            f"window {windows[-1]} is of no document; {len(documents)} windows have one", code="fault.no-document"
        )
    return tuple(documents[window] for window in windows)


@functools.lru_cache(maxsize=8)
def resample_counts(n_windows: int, resamples: int, seed: int) -> np.ndarray:
    """How often each window is drawn in each resample, float64 [resamples, n_windows], read-only."""
    draws = np.random.default_rng(seed).integers(0, n_windows, (resamples, n_windows))
    flat = draws + n_windows * np.arange(resamples)[:, None]
    counts = np.bincount(flat.ravel(), minlength=resamples * n_windows).astype(np.float64)
    counts.setflags(write=False)
    return counts.reshape(resamples, n_windows)


def interval(value: float, resampled: np.ndarray, jackknife: np.ndarray, confidence: float) -> tuple[float, float, str]:
    r"""Two-sided interval of a statistic over n windows.

    From 8 windows on: BCa (Efron & Tibshirani 1993, equations 14.9, 14.10 and 14.15, acceleration from
    the jackknife over windows). Its nominal normal quantile is widened to
    :math:`\sqrt{n/(n-1)}\,t_{n-1}` because resampled windows scatter too little by (n-1)/n and their
    scatter is itself estimated (Hesterberg 2015, The American Statistician 69, section 4).

    Nor does it end inside :math:`value \pm t_{n-1}\, se`, with the jackknife's standard error (Efron &
    Tibshirani 1993, equation 11.5). BCa reads skewness and bias off the sample; where few windows of
    heavy-tailed tokens make a statistic (a Shapley part, a sum of layers), these readings are mostly noise
    and it covers less than it says, while the t interval covers less where the skewness is real (a mean
    KL). Both are exact to first order, so the wider end of the two costs a few per cent of width, and
    what it covers is measured in ``results/planted``.

    Below 8 windows no bootstrap covers what it says, and the t interval stands alone.

    Parameters
    ----------
    value : float
        The statistic of the data.
    resampled : float64 [resamples]
    jackknife : float64 [windows]
        The statistic without each window.
    confidence : float in (0, 1)

    Returns
    -------
    low, high : float
    method : str
        ``bca``, ``t`` or ``percentile``.
    """
    n = jackknife.size
    quantile = float(stdtrit(n - 1, 0.5 + confidence / 2))
    if np.ptp(resampled) <= 1e-12 * abs(value):
        return float(min(value, resampled.min())), float(max(value, resampled.max())), "percentile"
    pull = jackknife - jackknife.mean()
    half = quantile * math.sqrt((n - 1) / n * float(pull @ pull))
    if n < FEWEST_FOR_BCA:
        return value - half, value + half, "t"
    wide = math.sqrt(n / (n - 1)) * quantile
    levels, method = bca_levels(value, resampled, jackknife, wide), "bca"
    if levels is None:
        levels, method = (_NORMAL.cdf(-wide), _NORMAL.cdf(wide)), "percentile"
    low, high = np.quantile(resampled, levels)
    return float(min(low, value - half)), float(max(high, value + half)), method


def bca_levels(value: float, resampled: np.ndarray, jackknife: np.ndarray, wide: float) -> tuple[float, float] | None:
    """Which quantiles of the resamples bound the BCa interval (Efron & Tibshirani 1993, 14.10).

    `wide` is the normal quantile before correction. None where the correction is undefined (the
    acceleration is so large that its denominator changes sign).
    """
    pull = jackknife.mean() - jackknife
    spread = float(pull @ pull) ** 1.5
    acceleration = float((pull**3).sum()) / (6 * spread) if spread > 0 else 0.0
    if abs(acceleration) * wide >= 1:
        return None
    below = float((resampled < value).mean() + (resampled == value).mean() / 2)
    edge = 1 / (resampled.size + 1)
    bias = _NORMAL.inv_cdf(min(max(below, edge), 1 - edge))
    shifted = [bias + z for z in (-wide, wide)]
    if any(acceleration * z >= 1 for z in shifted):
        return None
    low, high = (_NORMAL.cdf(bias + z / (1 - acceleration * z)) for z in shifted)
    return low, high
