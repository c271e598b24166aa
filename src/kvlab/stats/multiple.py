"""Many tests at once: p-values that are exact over windows, their false discovery rate and family-wise error."""

from __future__ import annotations

import numpy as np

from kvlab.core.errors import Fault, NonFinite


def benjamini_hochberg(p_values) -> np.ndarray:
    r"""q-values: the smallest false discovery rate at which each test is rejected.

    :math:`q_{(i)} = \min_{j \ge i} \min(1, m\,p_{(j)} / j)` with p sorted ascending (Benjamini &
    Hochberg 1995, step-up procedure).

    Parameters
    ----------
    p_values : float [tests]

    Returns
    -------
    float64 [tests], in the order given

    Raises
    ------
    NonFinite
        When a p-value is not a number in [0, 1].
    """
    p = _checked(p_values)
    order = np.argsort(p)
    scaled = p[order] * p.size / np.arange(1, p.size + 1)
    q = np.empty_like(p)
    q[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1)
    return q


def holm(p_values) -> np.ndarray:
    r"""Adjusted p-values: the smallest family-wise error at which each test is rejected.

    :math:`\tilde p_{(i)} = \max_{j \le i} \min(1, (m - j + 1)\,p_{(j)})` with p sorted ascending (Holm 1979,
    Scandinavian Journal of Statistics 6:65, step-down procedure). However the tests depend on one another, the chance
    that any true hypothesis has an adjusted p of at most alpha is at most alpha.

    Parameters
    ----------
    p_values : float [tests]

    Returns
    -------
    float64 [tests], in the order given

    Raises
    ------
    NonFinite
        When a p-value is not a number in [0, 1].
    """
    p = _checked(p_values)
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)), 1)
    return adjusted


def _checked(p_values) -> np.ndarray:
    p = np.asarray(p_values, dtype=np.float64)
    if not ((p >= 0) & (p <= 1)).all():
        raise NonFinite(f"p-values must lie in [0, 1]: {p.tolist()}")
    return p


def sign_flip_p(differences: np.ndarray, *, draws: int, seed: int) -> float:
    """One-sided p-value that paired differences are centred on zero, against that they are larger.

    When two conditions are exchangeable within each window, the sign of every window's difference is
    a coin (Fisher 1935, section 21). All 2^n sign patterns are counted when there are no more than
    `draws`, otherwise `draws` random ones and the observed one (Davison & Hinkley 1997, equation
    4.11), so p is never 0.

    Parameters
    ----------
    differences : float64 [windows]
        Condition minus reference, one per window.
    draws : int
        Random sign patterns at most.
    seed : int

    Returns
    -------
    float in (0, 1]
    """
    flipped, observed, slack, exact = _flipped(differences, draws, seed)
    return _share(flipped >= observed - slack, exact)


def sign_flip_two_sided_p(differences: np.ndarray, *, draws: int, seed: int) -> float:
    """Two-sided p-value that paired differences are centred on zero, whichever way they are off it.

    As `sign_flip_p`, with the size of the sum in place of the sum (Fisher 1935, section 21, which counts the
    arrangements that give a total as large as the observed one in either direction). A pattern and its
    opposite give the same size, so the smallest exact p is 2 / 2^n.

    Parameters
    ----------
    differences : float64 [windows]
        Condition minus reference, one per window.
    draws : int
        Random sign patterns at most.
    seed : int

    Returns
    -------
    float in (0, 1]
    """
    flipped, observed, slack, exact = _flipped(differences, draws, seed)
    return _share(np.abs(flipped) >= abs(observed) - slack, exact)


def _flipped(differences: np.ndarray, draws: int, seed: int) -> tuple[np.ndarray, float, float, bool]:
    """Sums under the sign patterns, the observed sum, a slack for rounding, and whether all patterns are there."""
    differences = np.asarray(differences, dtype=np.float64)
    n = differences.size
    if not n:
        raise Fault("a test over windows needs at least one window", code="fault.too-few-windows")
    exact = n < 60 and 1 << n <= draws
    if exact:
        patterns = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
    else:
        patterns = np.random.default_rng(seed).integers(0, 2, (draws, n))
    slack = 1e-12 * float(np.abs(differences).sum())
    return (2 * patterns - 1) @ differences, float(differences.sum()), slack, exact


def _share(reached: np.ndarray, exact: bool) -> float:
    """Share of the patterns; random ones are counted with the observed one."""
    return int(reached.sum()) / reached.size if exact else (1 + int(reached.sum())) / (1 + reached.size)
