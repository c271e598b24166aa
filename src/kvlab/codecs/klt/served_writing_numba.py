"""Writing rows of `klt` without escapes whose K is coded after its rotary embedding, compiled by numba.

What a key is made before it is coded is in `served_numba`, which reads these rows. Where numba is not installed,
nothing imports this module.
"""

from __future__ import annotations

import numpy as np
from numba import uint8
from numpy.typing import NDArray
from torch import Tensor

from kvlab.codecs.klt.halves import lent
from kvlab.codecs.klt.reading import RowReader
from kvlab.codecs.klt.reading_numba import way_of
from kvlab.codecs.klt.served_numba import exact_numbers, numbers_of, parts_of, room_of
from kvlab.codecs.klt.tables_numba import StreamTables, tables_of
from kvlab.codecs.klt.tiles_numba import TILE, compiled, first_of
from kvlab.codecs.klt.vectors_numba import matrix_of
from kvlab.codecs.klt.writing_numba import places_of
from kvlab.codecs.shared.lines_numba import products
from kvlab.codecs.shared.softmax_numba import store, widen
from kvlab.codecs.shared.turning import RUN

NO_PLACES = (np.empty(0, np.int64),) * 3


class ServedWriter:
    """Tokens of one layer coded into their rows, K and V by one call.

    Parameters
    ----------
    k, v : RowReader
        Of the layer, whose plans have the way to components too.
    """

    def __init__(self, k: RowReader, v: RowReader):
        self.k, self.v = (StreamTables(part.read.active, way_of(part.plan, part.plan.forward)) for part in (k, v))
        self.room = room_of(self.k, self.v, max(k.read.bytes, v.read.bytes))

    def __call__(
        self,
        k: Tensor,
        v: Tensor,
        rows: NDArray,
        slots: NDArray,
        first: int,
        turn: tuple[NDArray, NDArray],
        at: NDArray,
        places: tuple[NDArray, NDArray, NDArray] = NO_PLACES,
        stored: Tensor | None = None,
    ) -> bool:
        """Code tokens [n, heads, head_dim]; whether it was done, and nothing where a component is not finite.

        V's bytes begin at `first` of a row. `turn` are cosines and sines float32 [positions, head_dim / 2], and `at`
        the positions of the tokens, int64 [n]. `places` of `stored` take tokens as they are (`softmax_numba.store`).
        """
        k, v = numbers_of(k), numbers_of(v)
        kept = exact_numbers(stored, k)
        room = lent("served", (self.room,))
        tables = self.k.addresses, self.v.addresses
        return write(k, v, *turn, at, *tables, rows, slots, first, room, *places, kept)


@compiled
def _less_mean(x, way):
    """Tokens [n, heads, head_dim], float32 or bfloat16 as its bits, less their mean, as numbers."""
    tokens, heads, head_dim = x.shape
    mean, found = way.mean.reshape((heads, head_dim)), np.empty(x.shape, np.float32)
    for token in range(tokens):
        for head in range(heads):
            own = found[token, head]
            widen(x[token, head], own, own.view(np.int32))
            for at in range(head_dim):
                own[at] -= mean[head, at]
    return found


@compiled
def _less_turned_mean(x, way, cos, sin, positions):
    """The same of K after its rotary embedding: less its mean at the position, turned back by where its run begins."""
    tokens, heads, head_dim = x.shape
    half, mean, found = head_dim // 2, way.mean.reshape((heads, head_dim)), np.empty(x.shape, np.float32)
    for token in range(tokens):
        position = positions[token]
        c, s, begun = cos[position], sin[position], position - position % RUN
        c_back, s_back = cos[begun], sin[begun]
        for head in range(heads):
            own, m = found[token, head], mean[head]
            widen(x[token, head], own, own.view(np.int32))
            for at in range(half):
                a = own[at] - (m[at] * c[at] - m[half + at] * s[at])
                b = own[half + at] - (m[half + at] * c[at] + m[at] * s[at])
                size = c_back[at] * c_back[at] + s_back[at] * s_back[at]
                own[at] = (a * c_back[at] + b * s_back[at]) / size
                own[half + at] = (b * c_back[at] - a * s_back[at]) / size
    return found


@compiled
def _components(x, a, way, matrix, z):
    """Components with bits of tokens less their mean [n, heads, head_dim], into float32 [n, active].

    Whether all are finite.
    """
    tokens = len(x)
    groups, width = way.mean.shape
    flat, found = np.zeros((groups, tokens + 2, width), np.float32), np.empty((3, len(matrix)), np.float32)
    for token in range(tokens):
        own = x[token].reshape((groups, width))
        for group in range(groups):
            for at in range(width):
                flat[group, token, at] = own[group, at] * way.column[group, at]
    matrix_of(way.halves, way.row, a.component, matrix)
    wrong = 0
    for group in range(groups):
        low, high = first_of(group, a), first_of(group + 1, a)
        for token in range(0, tokens, 3):
            products(flat[group, token : token + 3], matrix[low:high], 0, width, found)
            for more in range(min(3, tokens - token)):
                for line in range(high - low):
                    value = found[more, line]
                    wrong += 0 if abs(value) < np.inf else 1
                    z[token + more, low + line] = value
    return wrong == 0


@compiled
def _put(z, a, rows, slots, first, bytes, room):
    """The symbols of tokens' components with bits [n, active] into so many of their rows' bytes, a tile at a time.

    `room` is uint8 [bytes or more, TILE].
    """
    line, places = np.empty(TILE, np.float32), np.empty(TILE, np.int32)
    for start in range(0, len(z), TILE):
        count = min(TILE, len(z) - start)
        room[:bytes, :count] = 0
        for number in range(len(a.component)):
            for token in range(count):
                line[token] = z[start + token, number]
            places_of(line[:count], a.values, a.table[number], a.most[number], places[:count])
            for digit in range(a.digit[number], a.digit[number + 1]):
                own, up, mask, down = room[a.byte[digit]], a.up[digit] & 7, a.mask[digit], a.down[digit] & 7
                for token in range(count):
                    own[token] |= uint8(uint8(uint8(places[token] >> up) & mask) << down)
        for token in range(count):
            row = rows[slots[start + token], first : first + bytes]
            for at in range(bytes):
                row[at] = room[at, token]


@compiled
def write(k, v, cos, sin, positions, k_tables, v_tables, rows, slots, first, room, sources, kept_rows, places, stored):
    """See `ServedWriter`; both streams are made components before a byte is written."""
    (ka, kw), (va, vw) = tables_of(k_tables), tables_of(v_tables)
    matrix, _, columns = parts_of(room, kw.mean)
    k_rest, v_rest = _less_turned_mean(k, kw, cos, sin, positions), _less_mean(v, vw)
    k_z, v_z = np.empty((len(k), len(ka.component)), np.float32), np.empty((len(v), len(va.component)), np.float32)
    if not (_components(k_rest, ka, kw, matrix, k_z) and _components(v_rest, va, vw, matrix, v_z)):
        return False
    _put(k_z, ka, rows, slots, 0, first, columns)
    _put(v_z, va, rows, slots, first, rows.shape[1] - first, columns)
    store(k, v, sources, kept_rows, places, stored)
    return True
