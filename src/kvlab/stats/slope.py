"""Slope of a power law, fitted on logarithms."""

from __future__ import annotations

import numpy as np

from kvlab.core.errors import Fault
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate

FLOOR_MULTIPLE = 10.0
SATURATION = 0.5
QUADRATIC = 2.0
SLOPE_TOLERANCE = 0.5


def linear_range(x: np.ndarray, kl: np.ndarray, floor: float) -> np.ndarray:
    """Which points of a KL curve lie where the model responds linearly, bool [points].

    KL of small noise is quadratic in it. Going up from the smallest noise whose mean KL is above 10 times
    the identity cell's (below, the engine's own noise shows), points belong to the range as long as the
    slope from one to the next, on logarithms, is within a quarter of two and KL is below 0.5 nat.

    Parameters
    ----------
    x : float64 [points], ascending
        Size of the noise.
    kl : float64 [points]
        Mean KL, nats per token.
    floor : float
        Mean KL of the identity cell.
    """
    x, kl = np.asarray(x), np.asarray(kl)
    inside = np.zeros(kl.size, dtype=bool)
    usable = (x > 0) & (kl > FLOOR_MULTIPLE * floor) & (kl > 0) & (kl < SATURATION)
    for i in np.flatnonzero(usable):
        previous = np.flatnonzero(inside)
        if previous.size:
            j = previous[-1]
            slope = np.log(kl[i] / kl[j]) / np.log(x[i] / x[j])
            if j != i - 1 or abs(slope - QUADRATIC) > SLOPE_TOLERANCE:
                break
        inside[i] = True
    return inside


def log_log_slope(bootstrap: Bootstrap, x: np.ndarray, columns: list[Column]) -> Estimate:
    r"""Slope of log(mean of each column) against log(x), with its interval over windows.

    Weighted least squares with weights :math:`(\bar y_i / se_i)^2`, the inverse variance of
    :math:`\log \bar y_i` (delta method), with `se` between windows; the weights are fixed by the data
    and the fit is repeated in every resample. KL of small noise is quadratic in it, so the slope is 2.

    Parameters
    ----------
    bootstrap : Bootstrap
    x : float64 [points], positive
        At least two different values.
    columns : list of Column, paired
        One per point.
    """
    x = np.log(np.asarray(x, dtype=np.float64))
    if len(columns) != x.size or np.unique(x).size < 2:
        raise Fault(
            f"a slope needs a column per point and two different points, not {x.size} points",
            code="fault.too-few-points",
        )
    weights = inverse_variances(columns)
    centred = x - weights @ x
    pull = weights * centred / (weights @ centred**2)
    return bootstrap.combine(columns, lambda means: np.log(means) @ pull)


def inverse_variances(columns: list[Column]) -> np.ndarray:
    """Weights of columns' log means as `log_log_slope` says, float64 [columns], of sum 1; equal where one is exact."""
    weights = np.array([_weight(column) for column in columns])
    return weights / weights.sum() if np.isfinite(weights).all() else np.full(len(columns), 1 / len(columns))


def _weight(column: Column) -> float:
    mean, n = column.means.mean(), len(column.windows)
    variance = column.means.var(ddof=1) / n
    return mean**2 / variance if variance > 0 else np.inf
