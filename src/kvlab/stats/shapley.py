"""Exact division of a gap among binary factors.

A full factorial over k factors has 2^k corners. *Corner i* has factor j at its high level when bit j of
i is set, so corner 0 is all low and corner 2^k - 1 all high. Both functions are linear in the corner
values, so they are one matrix product and take any number of resamples at once.
"""

from __future__ import annotations

import functools
from itertools import combinations
from math import factorial

import numpy as np

from kvlab.core.errors import Fault


def corner_index(high: list[bool] | tuple[bool, ...]) -> int:
    """Index of the corner whose factor j is at its high level where ``high[j]``."""
    return sum(1 << j for j, is_high in enumerate(high) if is_high)


def shapley(corners: np.ndarray) -> np.ndarray:
    r"""Shapley value of each factor (Shapley 1953).

    .. math:: \phi_i = \sum_{S \not\ni i} \frac{|S|!\,(k-|S|-1)!}{k!}\,[v(S \cup i) - v(S)]

    The parts sum to ``corners[..., -1] - corners[..., 0]``, the gap.

    Parameters
    ----------
    corners : float64 [..., 2**k]

    Returns
    -------
    float64 [..., k]

    Raises
    ------
    Fault
        When the number of corners is not a power of two.
    """
    return corners @ _value_weights(_factors(corners))


def interactions(corners: np.ndarray) -> np.ndarray:
    r"""Shapley interaction index of each pair of factors (Grabisch & Roubens 1999, equation 3).

    .. math:: I_{ij} = \sum_{S \not\ni i, j} \frac{|S|!\,(k-|S|-2)!}{(k-1)!}\,
        [v(S \cup ij) - v(S \cup i) - v(S \cup j) + v(S)]

    What two factors do together beyond the sum of what each does alone, averaged over the others.

    Parameters
    ----------
    corners : float64 [..., 2**k]

    Returns
    -------
    float64 [..., k (k - 1) / 2], pairs in the order of ``pairs(k)``
    """
    return corners @ _interaction_weights(_factors(corners))


def pairs(k: int) -> list[tuple[int, int]]:
    """All pairs of factors, in the order of `interactions`."""
    return list(combinations(range(k), 2))


def _factors(corners: np.ndarray) -> int:
    size = corners.shape[-1]
    if size < 1 or size & (size - 1):
        raise Fault(f"a factorial over binary factors has 2^k corners, not {size}", code="fault.corners")
    return size.bit_length() - 1


@functools.cache
def _value_weights(k: int) -> np.ndarray:
    weights = np.zeros((1 << k, k))
    for i in range(k):
        for corner in range(1 << k):
            others = (corner & ~(1 << i)).bit_count()
            share = factorial(others) * factorial(k - others - 1) / factorial(k)
            weights[corner, i] = share if corner >> i & 1 else -share
    return weights


@functools.cache
def _interaction_weights(k: int) -> np.ndarray:
    weights = np.zeros((1 << k, len(pairs(k))))
    for column, (i, j) in enumerate(pairs(k)):
        for corner in range(1 << k):
            others = (corner & ~(1 << i | 1 << j)).bit_count()
            share = factorial(others) * factorial(k - others - 2) / factorial(k - 1)
            weights[corner, column] = share if (corner >> i & 1) == (corner >> j & 1) else -share
    return weights
