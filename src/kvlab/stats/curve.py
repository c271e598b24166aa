"""Reading a measured curve between its points."""

from __future__ import annotations

import numpy as np

from kvlab.core.errors import Fault


def between(x: np.ndarray, at: float) -> np.ndarray | None:
    """Weights of the points of a curve whose weighted sum is its value at `at`, by linear interpolation.

    Parameters
    ----------
    x : float64 [points]
        Where the curve was measured, all different, in any order.
    at : float
        Where it is read.

    Returns
    -------
    float64 [points] or None
        At most two are not zero; they sum to 1. None outside the measured range.

    Raises
    ------
    Fault
        When two points coincide.
    """
    x = np.asarray(x, dtype=np.float64)
    if np.unique(x).size != x.size:
        raise Fault(f"a curve needs its points at different places, not at {x.tolist()}", code="fault.same-place")
    if not (x.size and x.min() <= at <= x.max()):
        return None
    order = np.argsort(x)
    return np.array([np.interp(at, x[order], (order == point).astype(np.float64)) for point in range(x.size)])
