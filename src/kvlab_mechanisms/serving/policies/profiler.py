"""Percentiles in constant memory: log-linear counts, merged across processes by adding them.

Within each power of two there are 2^bits buckets of equal width, so a value is known to 1 / 2^bits of itself (as
HdrHistogram does; Masson, Rim & Lee 2019, DDSketch, VLDB 12:2195, section 2.1, compares such sketches).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import numpy as np
from numpy.typing import ArrayLike

from kvlab.core.errors import UserError

BITS = 6
SMALLEST = -40  # exponent below which a value counts as 0: 2^-40 s is a picosecond
LARGEST = 64
PERCENTS = (50.0, 90.0, 99.0, 99.9)


class Histogram:
    """Counts of values of at least 0."""

    def __init__(self, bits: int = BITS):
        self.bits, self.counts, self.zeros, self.total = bits, {}, 0, 0
        self.sum, self.low, self.high = 0.0, math.inf, 0.0
        self._lock = Lock()

    def record(self, value: float, times: int = 1) -> None:
        """Count a value; negative and non-finite ones are refused."""
        if not 0 <= value < math.inf:
            raise UserError(f"{value!r} is no duration; allowed: a finite number of at least 0")
        fraction, exponent = math.frexp(value)
        with self._lock:
            self.total += times
            self.sum += value * times
            if value < self.low:
                self.low = value
            if value > self.high:
                self.high = value
            if exponent <= SMALLEST:
                self.zeros += times
            else:
                bucket = (min(exponent, LARGEST) << self.bits) + int((2 * fraction - 1) * (1 << self.bits))
                self.counts[bucket] = self.counts.get(bucket, 0) + times

    def ingest(self, values: ArrayLike) -> None:
        """Count many values at once."""
        found = np.asarray(values, float).ravel()
        if not (np.isfinite(found).all() and (found >= 0).all()):
            raise UserError("a value is negative or not finite; allowed: finite numbers of at least 0")
        if not len(found):
            return
        fraction, exponent = np.frexp(found)
        some = exponent > SMALLEST
        buckets = (np.minimum(exponent, LARGEST).astype(np.int64) << self.bits) + (
            (2 * fraction - 1) * (1 << self.bits)
        ).astype(np.int64)
        names, times = np.unique(buckets[some], return_counts=True)
        with self._lock:
            self.total += len(found)
            self.zeros += int((~some).sum())
            self.sum += float(found.sum())
            self.low, self.high = min(self.low, float(found.min())), max(self.high, float(found.max()))
            for name, count in zip(names.tolist(), times.tolist(), strict=True):
                self.counts[name] = self.counts.get(name, 0) + count

    def merge(self, other: Histogram) -> None:
        """Count what another counted too."""
        if other.bits != self.bits:
            raise UserError(
                f"a histogram of {other.bits} bits into one of {self.bits}; allowed: as many",
                code="user.histogram-bits",
            )
        with self._lock:
            for name, count in other.counts.items():
                self.counts[name] = self.counts.get(name, 0) + count
            self.zeros, self.total, self.sum = self.zeros + other.zeros, self.total + other.total, self.sum + other.sum
            self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def _middle(self, bucket: int) -> float:
        exponent, part = bucket >> self.bits, bucket & ((1 << self.bits) - 1)
        return math.ldexp(0.5 * (1 + (part + 0.5) / (1 << self.bits)), exponent)

    def percentiles(self, percents: tuple[float, ...] = PERCENTS) -> list[float]:
        """Values below or at which so many percent lie, to 1 / 2^bits; NaN where nothing was counted."""
        if not self.total:
            return [math.nan] * len(percents)
        found, seen, ordered = [], self.zeros, iter(sorted(self.counts.items()))
        value = 0.0
        for percent in percents:
            rank = max(1, math.ceil(round(percent * self.total / 100, 6)))  # 99.9 % of 1,000 is 999
            while seen < rank:
                bucket, count = next(ordered)
                seen, value = seen + count, self._middle(bucket)
            found.append(min(max(value, self.low), self.high))
        return found


class Profiler:
    """Histograms by operation; with `rotate`, those of the last one to two epochs alone.

    Parameters
    ----------
    clock : function
        Seconds; it times `span`.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self._now: dict[str, Histogram] = {}
        self._before: dict[str, Histogram] = {}
        self._lock = Lock()

    def record(self, name: str, seconds: float) -> None:
        """Count a duration."""
        found = self._now.get(name)
        if found is None:
            with self._lock:
                found = self._now.setdefault(name, Histogram())
        found.record(seconds)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        begun = self.clock()
        try:
            yield
        finally:
            self.record(name, self.clock() - begun)

    def rotate(self) -> None:
        """Begin an epoch, and forget the one before the last."""
        with self._lock:
            self._before, self._now = self._now, {}

    def of(self, name: str) -> Histogram:
        """What was counted of an operation in this epoch and the last."""
        both = Histogram()
        for one in (self._before, self._now):
            if name in one:
                both.merge(one[name])
        return both

    def prometheus(self) -> str:
        """All operations as summaries in Prometheus's text format."""
        lines = ["# TYPE kvlab_seconds summary"]
        for name in sorted(self._before.keys() | self._now.keys()):
            own, label = self.of(name), name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            for percent, value in zip(PERCENTS, own.percentiles(), strict=True):
                lines.append(f'kvlab_seconds{{op="{label}",quantile="{percent / 100:g}"}} {value!r}')
            lines.append(f'kvlab_seconds_sum{{op="{label}"}} {own.sum!r}')
            lines.append(f'kvlab_seconds_count{{op="{label}"}} {own.total}')
        return "\n".join(lines) + "\n"
