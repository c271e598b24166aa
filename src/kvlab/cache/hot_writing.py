"""A compiled loop that codes a few tokens of `klt`: from components to a token's bytes.

A token that comes alone takes torch some eighty calls, most of which look for escapes that few vectors need. Here a
vector is coded at once or named as one that has to be looked at; never are symbols others than torch's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.cache.pages.hot import compiled

HALF = np.float32(0.5)


class Usual(NamedTuple):
    """Where vectors are that need no look (`codec.klt.choosing.Chooser`).

    Parameters
    ----------
    low, high : array
        What no component goes beyond, float32 [groups, width].
    share, toward : array
        Weights of squares in a vector's level, and twice those of its products with the second mean, float32 [groups,
        width].
    sink : array
        Level of the second mean itself, float32 [groups].
    near, loud : float
        Of its own level, that of a vector from the second mean; and a level: above one and below the other.
    """

    low: NDArray
    high: NDArray
    share: NDArray
    toward: NDArray
    sink: NDArray
    near: float
    loud: float


@compiled
def _unusual(z, group, token, u):
    """Whether a vector has to be looked at."""
    level, toward = np.float32(0), np.float32(0)
    for at in range(z.shape[1]):
        own = z[group, at, token]
        if not (u.low[group, at] <= own <= u.high[group, at]):
            return True
        level += u.share[group, at] * own * own
        toward += u.toward[group, at] * own
    return not (level - toward + u.sink[group] > u.near * level and level < u.loud)


@compiled
def _place(values, count, value):
    """How many of the `count` ascending boundaries between a table's values lie below a value."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if value > (values[middle] + values[middle + 1]) * HALF:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def symbols(z, d, counts, escaping, u, out, looked):
    """Symbols of vectors z float32 [groups, width, n] into `out` uint8 [n, rows]; 1 in `looked` [n] where not known.

    `d` are the `Digits`, and `counts` the boundaries between the values of each component, uint8 [groups * width].
    """
    groups, width, tokens = z.shape
    for token in range(tokens):
        for group in range(groups):
            if escaping and _unusual(z, group, token, u):
                looked[token] = 1
            for at in range(width):
                row = group * width + at
                out[token, row] = _place(d.values[d.first[row] :], counts[row], z[group, at, token])


@compiled
def packed(own, d, out):
    """Bytes of tokens uint8 [n, bytes], zero before, of their symbols uint8 [n, rows]."""
    for token in range(len(own)):
        for at in range(len(d.byte)):
            out[token, d.byte[at]] |= ((own[token, d.symbol[at]] >> d.up[at]) & d.mask[at]) << d.down[at]
