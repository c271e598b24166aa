"""Compiled loops of attention over coded blocks: bytes of blocks to components, and scores of keys that are turned.

A block holds a component's digits of all its
tokens side by side (`codecs.klt.planes`): each step is a run over tokens, which a compiler makes vectors of.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import uint8
from numpy.typing import NDArray

from kvlab.codecs.klt.tiles_numba import TILE, compiled, gathered, values


class Places(NamedTuple):
    """Planes of digits (`codecs.klt.planes.Planes`), as arrays.

    Parameters
    ----------
    size : array
        Bits of a plane's digits, int64 [planes].
    start : array
        Where its digits begin in the two others, and where the last one's end, int64 [planes + 1].
    row, up : array
        The symbol of each digit, int32 [digits], and how far up it sits there, uint8 [digits].
    """

    size: NDArray
    start: NDArray
    row: NDArray
    up: NDArray


@compiled
def _run(data, low, down, mask, up, symbols):
    """Put the digits that bytes `low`, `low` + 1, ... hold at bit `down` into symbols."""
    for at in range(len(symbols)):
        symbols[at] |= uint8(uint8(uint8(data[low + at] >> down) & mask) << up)


@compiled
def _unpack(data, at, tokens, first, last, p, symbols):
    """Symbols of tokens `first` to `last` of the block at byte `at`, into uint8 [rows, TILE]."""
    symbols[:, : last - first] = 0
    for plane in range(len(p.size)):
        size, begin = p.size[plane], p.start[plane]
        rows = p.start[plane + 1] - begin
        length = (rows * tokens * size + 7) // 8
        mask = uint8((1 << size) - 1)
        for number in range(rows):
            row, up = p.row[begin + number], p.up[begin + number]
            digit, end, out = number * tokens + first, number * tokens + last, 0
            while digit < end:  # a row may begin in one run of the plane's bytes and end in the next
                run = digit // length
                stop = min(end, (run + 1) * length)
                _run(
                    data, at + digit - run * length, uint8(run * size), mask, up, symbols[row, out : out + stop - digit]
                )
                out += stop - digit
                digit = stop
        at += length


@compiled
def components(data, pieces, first, p, a, e, symbols, z, further, out, beside):
    """Components of what a row holds from column `first` on, as a tile's rows; columns in no piece are not written.

    Parameters
    ----------
    data : array
        Bytes of all pieces, uint8.
    pieces : array
        Where a piece's bytes begin, its first column, its tokens, and those of one of its blocks, int64 [pieces, 4].
    first : int
        Column of the first of `out`.
    p : Places
        Where digits lie.
    a, e, symbols, z, further
        See `tiles_numba.values`.
    out : array
        float32 [active + 2 * groups, columns], written.
    beside : Beside
        Written, of all columns.

    Returns
    -------
    int
        How many `beside` there are, more than it has room for where they do not fit; or a fault below 0.
    """
    found = 0
    for number in range(len(pieces)):
        at, column, tokens, size = pieces[number]
        length = _length(p, size)
        for block in range(tokens // size):
            start = column + block * size - first
            low, high = max(0, -start), min(size, out.shape[1] - start)
            for token in range(low, high, TILE):
                count = min(TILE, high - token)
                _unpack(data, at + block * length, size, token, token + count, p, symbols)
                more = values(symbols, count, a, e, z, further)
                if more < 0:
                    return more
                found = gathered(z, count, start + token, further, more, out, beside, found)
    return found


@compiled
def _length(p, tokens):
    """Bytes of a block."""
    total = 0
    for plane in range(len(p.size)):
        total += ((p.start[plane + 1] - p.start[plane]) * tokens * p.size[plane] + 7) // 8
    return total


@compiled
def scores(k, q, cos, sin, first, out):
    """Scores of queries at keys, which are turned by their positions in passing (RoFormer, arXiv 2104.09864).

    Parameters
    ----------
    k : array
        Keys before the rotary embedding, float32 [heads, head_dim, columns].
    q : array
        Queries, scaled, float32 [heads, queries, head_dim].
    cos, sin : array
        Of all of the row's columns, float32 [head_dim / 2, all columns].
    first : int
        Column of the first key.
    out : array
        float32 [heads, queries, columns], written.
    """
    half, columns = k.shape[1] // 2, k.shape[2]
    low, high = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for head in range(len(k)):
        for start in range(0, columns, TILE):
            stop = min(start + TILE, columns)
            out[head, :, start:stop] = 0
            for at in range(half):
                a, b = k[head, at, start:stop], k[head, at + half, start:stop]
                _turned(a, b, cos[at, first + start :], sin[at, first + start :], low, high)
                for query in range(q.shape[1]):
                    _added(out[head, query, start:stop], q[head, query, at], low, q[head, query, at + half], high)


@compiled
def _turned(a, b, c, s, low, high):
    """Pairs (a, b) turned, into `low` and `high`."""
    for at in range(len(a)):
        low[at] = a[at] * c[at] - b[at] * s[at]
        high[at] = b[at] * c[at] + a[at] * s[at]


@compiled
def _added(out, x, low, y, high):
    """Add x low + y high."""
    for at in range(len(out)):
        out[at] += x * low[at] + y * high[at]
