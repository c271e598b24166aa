"""The rate-distortion limit of a whole cache whose layers predict each other and whose tokens count unequally.

Every component of every layer's K and V, at every token, is a Gaussian source of its own. Its variance is an eigenvalue
of the covariance of what prediction leaves, in nats, times the weight of its token. Sources are only told apart by that
product, so that they are kept as counts over its logarithm. Reverse water-filling over all of them is

    R(D) = mean max(0, 1/2 log2(s / theta)),   D = mean min(theta, s)

(Cover and Thomas, Elements of Information Theory, 10.3.3), s over the sources. A codec of steps Delta whose indices are
entropy coded spends H(sigma / Delta) bits on a source instead, and errs by Delta^2 d(sigma / Delta); see `Scalar`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvlab.codecs.archive.layer import DEAD

BIN = 1 / 64  # of log2 of a variance; the rate is off by at most a quarter of it
LOWEST, HIGHEST = -120.0, 60.0
SIZE = round((HIGHEST - LOWEST) / BIN) + 1
CENTRES = LOWEST + BIN * np.arange(SIZE)


def counts(variances: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """How many sources have each log2 variance, float64 [SIZE]: all pairs of a component and a token.

    Parameters
    ----------
    variances : numpy.ndarray
        Of components, in nats, none below zero, any shape.
    weights : numpy.ndarray, optional
        Of tokens, above zero; None weighs one token by one.
    """
    found = _binned(variances)
    if weights is None:
        return found
    tokens, middle = _binned(weights), round(-LOWEST / BIN)  # the bin of 1
    sums = np.convolve(found, tokens)  # logarithms add up, counted from twice the lowest
    total = sums[middle : middle + SIZE].copy()
    total[0] += sums[:middle].sum()
    total[-1] += sums[middle + SIZE :].sum()
    return total


def _binned(values: np.ndarray) -> np.ndarray:
    logs = np.log2(np.maximum(np.asarray(values, dtype=float).ravel(), 2.0**LOWEST))
    places = np.clip(np.rint((logs - LOWEST) / BIN), 0, SIZE - 1).astype(int)
    return np.bincount(places, minlength=SIZE).astype(float)


@dataclass(frozen=True)
class Bound:
    """Reverse water-filling over sources that are kept as counts.

    Parameters
    ----------
    counted : numpy.ndarray
        Sources by log2 variance, float64 [SIZE].
    """

    counted: np.ndarray

    def at_level(self, level: float) -> tuple[float, float]:
        """Bits and mean squared error per source at log2 theta = `level`."""
        total = self.counted.sum()
        bits = float((self.counted * np.maximum(0, CENTRES - level)).sum() / 2 / total)
        error = float((self.counted * np.exp2(np.minimum(CENTRES, level))).sum() / total)
        return bits, error

    def rate(self, error: float) -> float:
        """The least bits per source at a mean squared error; 0 where the error is that of no bits at all."""
        return self._at(lambda level: self.at_level(level)[1] < error)[0]

    def error(self, bits: float) -> float:
        """The least mean squared error at so many bits per source."""
        return self._at(lambda level: self.at_level(level)[0] > bits)[1]

    def _at(self, below) -> tuple[float, float]:
        """Bits and error at the level where `below` of a level turns false."""
        low, high = LOWEST, HIGHEST
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if below(middle) else (low, middle)
        return self.at_level((low + high) / 2)


class Scalar:
    """A uniform quantiser with a dead zone on a Gaussian, its indices entropy coded and rebuilt at their centroids.

    Tabulated over log2(sigma / Delta), numerically: H bits, and the mean squared error over Delta^2. H - R(D) goes
    towards 1/2 log2(2 pi e / 12) = .254 bits for fine steps (Gish and Pierce 1968, IEEE Trans. Inf. Theory 14).
    """

    def __init__(self, dead: float = DEAD):
        self.logs = np.arange(-8.0, 8.01, 1 / 32)
        found = [_gaussian_cells(2.0**log, dead) for log in self.logs]
        self.bits, self.error = (np.array(column) for column in zip(*found, strict=True))

    def cost(self, log_ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bits, and squared error over Delta^2, at log2(sigma / Delta), elementwise."""
        fine = np.maximum(log_ratio - self.logs[-1], 0)  # beyond the table each octave is a bit
        bits = np.interp(log_ratio, self.logs, self.bits) + fine
        coarse = np.minimum(log_ratio - self.logs[0], 0)  # below it nothing is coded, and the error is the variance
        return bits, np.interp(log_ratio, self.logs, self.error) * np.exp2(2 * coarse)


def _gaussian_cells(sigma: float, dead: float) -> tuple[float, float]:
    """Entropy in bits and mean squared error, for steps of 1 and a deviation of sigma."""
    edges = np.arange(int(9 * sigma) + 2) + 0.5 + dead  # of magnitudes
    lower, upper = np.concatenate(([-edges[0]], edges[:-1])) / sigma, edges / sigma
    inside = _normal(upper) - _normal(lower)
    inside[1:] = np.maximum(inside[1:], 0)
    first = _density(lower) - _density(upper)  # of z within a cell; none in the middle one
    second = inside + lower * _density(lower) - upper * _density(upper)
    both = np.concatenate((inside[:1], np.repeat(inside[1:], 2)))
    seen = both[both > 0]
    spread = second - np.divide(first**2, inside, out=np.zeros_like(first), where=inside > 0)
    error = sigma**2 * (spread[0] + 2 * np.maximum(spread[1:], 0).sum())
    return float(-(seen * np.log2(seen)).sum()), float(error)


def _normal(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
