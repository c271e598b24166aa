"""The loop that serving spends its time in, compiled by numba: rows of `klt` to components, token by token.

Attention over coded pages decodes all tokens of all sequences in every step. What torch does for that in some thirty
passes over arrays (`Planes.unpack`, `Synthesis`, `Tails.read`) is one pass here, over a token's bytes while they are
near. vLLM depends on numba; where it is not installed, nothing imports this module, and torch does all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvlab.codecs.klt.bits import VALUE_BITS
from kvlab.codecs.klt.fields import COUNT_BITS
from kvlab.codecs.klt.reading import IMPOSSIBLE, NO_PLAIN, OK, TOO_MANY
from kvlab.codecs.klt.scales import PLAIN, SCALE_BITS

SCALE_END = COUNT_BITS + SCALE_BITS


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


class Escapes(NamedTuple):
    """Where escapes lie (`codecs.klt.escapes.Tails`), as arrays.

    Parameters
    ----------
    there : bool
        Whether the recipe has them; the rest is empty where not.
    component, place : array
        Where each of their bits lies, int16 and uint8 [groups, bits].
    lost, start : array
        Bits that components give up, uint8, and where the values of what is left begin, int32 [groups, counts, width].
    values : array
        Those of all components at every number of known bits, float32 [all].
    scales : array
        float32 [32].
    halves : array
        The number that each 16 bits stand for, float32 [65536].
    index_bits, room : int
        Bits that name a component, and pairs that a vector can hold.
    plain_component, plain_place : array
        Where the bits of a vector without tables lie, int16 and uint8 [groups, bits]; no group where it has too few.
    plain_wide, plain_bits, plain_table : array
        How many coefficients have a bit more, int64 [groups]; bits of those and of the others, int64 [groups, 2]; their
        tables, float32 [groups, 2, most].
    turn, unit, deviation : array
        What the way back to components is made of (`codecs.klt.plain`): float64 [width, width], the same for all
        layers; float64 [groups]; float32 [groups, width].
    """

    there: bool
    component: NDArray
    place: NDArray
    lost: NDArray
    start: NDArray
    values: NDArray
    scales: NDArray
    halves: NDArray
    index_bits: int
    room: int
    plain_component: NDArray
    plain_place: NDArray
    plain_wide: NDArray
    plain_bits: NDArray
    plain_table: NDArray
    turn: NDArray
    unit: NDArray
    deviation: NDArray


def compiled(function):
    """A function compiled when it is first called, and kept on disk where there is a place for that."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder can be written to: each process compiles anew
        return njit(nogil=True)(function)


@compiled
def _bits(symbols, component, place, first, last):
    """The number whose bits, lowest first, lie at `first` to `last`."""
    found = 0
    for at in range(first, last):
        found |= ((symbols[component[at]] >> place[at]) & 1) << (at - first)
    return found


@compiled
def _pairs(symbols, group, count, e, z):
    """Put `count` pairs of component and value into z."""
    component, place, first = e.component[group], e.place[group], COUNT_BITS
    for _ in range(count):
        middle = first + e.index_bits
        index = _bits(symbols, component, place, first, middle)
        value = e.halves[_bits(symbols, component, place, middle, middle + VALUE_BITS)]
        if index >= z.shape[0] or not np.isfinite(value):
            return IMPOSSIBLE
        z[index] = value
        first = middle + VALUE_BITS
    return OK


@compiled
def _plain(symbols, group, e, z):
    """Put a vector without tables into z."""
    if e.plain_table.shape[0] == 0:
        return NO_PLAIN
    size = e.halves[_bits(symbols, e.component[group], e.place[group], SCALE_END, SCALE_END + VALUE_BITS)]
    if not np.isfinite(size):
        return IMPOSSIBLE
    component, place, first = e.plain_component[group], e.plain_place[group], 0
    z[:] = 0
    for row in range(z.shape[0]):
        narrow = 0 if row < e.plain_wide[group] else 1
        last = first + e.plain_bits[group, narrow]
        value = e.plain_table[group, narrow, _bits(symbols, component, place, first, last)] * size
        first = last
        for at in range(z.shape[0]):
            z[at] += value * np.float32(e.turn[at, row] * e.unit[group] / np.float64(e.deviation[group, at]))
    return OK


@compiled
def _escaped(symbols, group, e, z):
    """Put an escaped vector into z: a fault or OK, and 1 where it is about the second mean."""
    component, place = e.component[group], e.place[group]
    count = _bits(symbols, component, place, 0, COUNT_BITS)
    if count > e.room:
        return TOO_MANY, 0
    number = _bits(symbols, component, place, COUNT_BITS, SCALE_END) if count == 0 else PLAIN
    if count == 0 and number == PLAIN:
        return _plain(symbols, group, e, z), 0
    scale = e.scales[number]  # that of `PLAIN` is 1
    for at in range(z.shape[0]):
        z[at] = e.values[e.start[group, count, at] + (symbols[at] >> e.lost[group, count, at])] * scale
    if count:
        return _pairs(symbols, group, count, e, z), 0
    return OK, 1 if number < PLAIN else 0


@compiled
def components(rows, slots, first, d, e, out):
    """Components of tokens, and 1 after those of a vector about the second mean.

    Parameters
    ----------
    rows : array
        All pages as rows, uint8 [slots, bytes].
    slots : array
        Which tokens, int64 [n].
    first : int
        Where the stream's bytes begin in a row.
    d : Digits
        Where the digits of symbols lie.
    e : Escapes
        Where escapes lie.
    out : array
        float32 [groups, n, width + 1], written.

    Returns
    -------
    int
        OK, or what is wrong with the first row that cannot be.
    """
    groups, width = out.shape[0], out.shape[2] - 1
    symbols = np.zeros(groups * width + groups, np.uint8)
    for token in range(len(slots)):
        row = rows[slots[token]]
        symbols[:] = 0
        for at in range(len(d.byte)):
            symbols[d.symbol[at]] |= ((row[first + d.byte[at]] >> d.down[at]) & d.mask[at]) << d.up[at]
        for group in range(groups):
            z, own = out[group, token, :width], symbols[group * width : (group + 1) * width]
            fault, second = OK, 0
            if e.there and symbols[groups * width + group]:
                fault, second = _escaped(own, group, e, z)
            else:
                for at in range(width):
                    z[at] = d.values[d.first[group * width + at] :][own[at]]
            if fault:
                return fault
            out[group, token, width] = second
    return OK
