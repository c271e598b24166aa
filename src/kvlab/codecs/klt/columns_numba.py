"""Compiled loops of attention over coded blocks: bytes of blocks to components, and scores of keys that are turned.

`pages.hot` reads a token at a time, since a page's tokens lie apart. A block holds a component's digits of all its
tokens side by side (`codecs.klt.planes`): each step is a run over tokens, which a compiler makes vectors of.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import uint8
from numpy.typing import NDArray

from kvlab.codecs.klt.rows_numba import OK, _escaped, compiled

STRIP = 256  # tokens at once: their symbols stay in a near cache


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


class Order(NamedTuple):
    """What symbols stand for, in the order of the components.

    Parameters
    ----------
    values : array
        Those of all components (`codecs.klt.trees.Trees`), float32 [all].
    first : array
        Where the table of each begins in them, int64 [groups * width].
    constant : array
        1 for one without bits, uint8 [groups, width].
    """

    values: NDArray
    first: NDArray
    constant: NDArray


@compiled
def _run(data, low, down, mask, up, symbols):
    """Put the digits that bytes `low`, `low` + 1, ... hold at bit `down` into symbols."""
    for at in range(len(symbols)):
        symbols[at] |= uint8(uint8(uint8(data[low + at] >> down) & mask) << up)


@compiled
def _unpack(data, at, tokens, first, last, p, symbols):
    """Symbols of tokens `first` to `last` of the block at byte `at`, into uint8 [rows, STRIP]."""
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
def _values(symbols, count, o, e, z, column, vector, escaped):
    """Components of `count` tokens' symbols into z, from its column `column` on; a fault or OK."""
    groups, width = o.constant.shape
    for group in range(groups):
        for at in range(width):
            row = group * width + at
            if o.constant[group, at] == 0:
                own, out, values = symbols[row], z[group, at], o.values[o.first[row] :]
                for token in range(count):
                    out[column + token] = values[own[token]]
        for token in range(count if e.there else 0):
            if symbols[groups * width + group, token]:
                fault, second = _escaped(symbols[group * width : (group + 1) * width, token], group, e, vector)
                if fault:
                    return fault
                for at in range(width):
                    usual = o.values[o.first[group * width + at]] if o.constant[group, at] else 0
                    z[group, at, column + token] = vector[at] - usual
                z[group, width, column + token] = second
                escaped[column + token] = 1
    return OK


@compiled
def components(data, pieces, first, p, o, e, z, escaped):
    """Components of what a row holds from column `first` on; columns that are in no piece are not written.

    Parameters
    ----------
    data : array
        Bytes of all pieces, uint8.
    pieces : array
        Where a piece's bytes begin, its first column, its tokens, and those of one of its blocks, int64 [pieces, 4].
    first : int
        Column of the first of z.
    p, o, e : Places, Order, Escapes
        Where digits lie, what they stand for, and where escapes lie.
    z : array
        Zeros, float32 [groups, width + 1, columns]; written. After a vector's components 1 where it is about the second
        mean. Of components without bits it is how far they are from their one value, which is 0 but in escaped vectors.
    escaped : array
        Zeros, uint8 [columns]; 1 where a vector was escaped.

    Returns
    -------
    int
        OK, or what is wrong with the first vector that cannot be (`reading.FAULTS`).
    """
    symbols = np.empty((len(o.first) + len(z), STRIP), np.uint8)
    vector = np.empty(z.shape[1] - 1, np.float32)
    for number in range(len(pieces)):
        at, column, tokens, size = pieces[number]
        length = _length(p, size)
        for block in range(tokens // size):
            start = column + block * size - first
            low, high = max(0, -start), min(size, z.shape[2] - start)
            for token in range(low, high, STRIP):
                count = min(STRIP, high - token)
                _unpack(data, at + block * length, size, token, token + count, p, symbols)
                fault = _values(symbols, count, o, e, z, start + token, vector, escaped)
                if fault:
                    return fault
    return OK


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
    low, high = np.empty(STRIP, np.float32), np.empty(STRIP, np.float32)
    for head in range(len(k)):
        for start in range(0, columns, STRIP):
            stop = min(start + STRIP, columns)
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
