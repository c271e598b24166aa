"""Rows of `klt` written by compiled loops, where a few tokens come at a time: from components to a token's bytes.

Where numba is not installed, nothing imports this module.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlab.codecs.base import all_finite
from kvlab.codecs.klt.codec import Plan
from kvlab.codecs.klt.grouping import centred
from kvlab.codecs.klt.reading_numba import digits, values_of
from kvlab.codecs.klt.rows import KltRows
from kvlab.codecs.klt.scales import LOUD, NEAR
from kvlab.codecs.klt.tiles_numba import compiled

HALF = np.float32(0.5)
SLACK = 1.02  # more than the chooser's own: what it would look at is looked at
FEW = 512  # tokens up to which a loop over each is sooner than torch over all: half the time for 1, the same for 512
NARROW = 1e-4  # of the range that the chooser does not look at, which rounds it otherwise


class Digits(NamedTuple):
    """Where the digits of a token's symbols lie, and what the symbols stand for.

    Parameters
    ----------
    symbol, byte : array
        Which symbol each digit is of, and its byte in the row, int32 [digits].
    down, mask, up : array
        The digit is ``(byte >> down & mask) << up`` of its symbol, uint8 [digits].
    values : array
        Those of all components (`codecs.klt.trees.Trees`), float32 [all].
    first : array
        Where the table of each begins in them, int64 [groups * width].
    """

    symbol: NDArray
    byte: NDArray
    down: NDArray
    mask: NDArray
    up: NDArray
    values: NDArray
    first: NDArray


class QuickRows(KltRows):
    """The same rows, sooner."""

    def __init__(self, rows: KltRows):
        self.site, self.plan, self.bytes = rows.site, rows.plan, rows.bytes
        arrays = (part.numpy() for part in digits(self.plan))
        self.digits, self.usual = Digits(*arrays, *values_of(self.plan)), usual_of(self.plan)
        self.counts = ((1 << self.plan.widths.flatten()) - 1).to(torch.uint8).numpy()

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """See `pages.rows.Rows`."""
        plan, x = self.plan, x.float()
        if x.shape[1] > FEW:
            return super().encode(x)
        z = plan._components(centred(x, plan.mean)).contiguous()
        if not all_finite(z):
            return super().encode(x)  # which says so
        count, rows = x.shape[1], plan.rows + plan.groups * plan.escaping
        own, looked = np.zeros((count, rows), np.uint8), np.zeros(count, np.uint8)
        symbols(z.numpy(), self.digits, self.counts, plan.escaping, self.usual, own, looked)
        at = looked.nonzero()[0]
        if len(at):
            known = torch.from_numpy(own[at, : plan.rows].T)
            own[at] = plan.analyse(x[:, torch.from_numpy(at)], self.site, known)[0].T.numpy()
        out = torch.zeros(count, self.bytes, dtype=torch.uint8)
        packed(own, self.digits, out.numpy())
        return out


def usual_of(plan: Plan) -> Usual:
    """Where a plan's usual vectors are; without escapes nothing reads it."""
    if not plan.escaping:
        none, nothing = np.zeros((0, 0), np.float32), np.zeros(0, np.float32)
        return Usual(none, none, none, none, nothing, 0.0, 0.0)
    choose = plan.choose
    within = (choose.high - choose.low) * NARROW
    low, high = (part.contiguous().numpy() for part in (choose.low + within, choose.high - within))
    share, toward = (part[:, 0].contiguous().numpy() for part in (choose.share, choose.toward_sink))
    return Usual(low, high, share, toward, choose.sink_square[:, 0].contiguous().numpy(), SLACK * NEAR, LOUD / SLACK)


class Usual(NamedTuple):
    """Where vectors are that need no look (`codecs.klt.choosing.Chooser`).

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
