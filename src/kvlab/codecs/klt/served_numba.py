"""Serving from rows of `klt` without escapes whose K was coded after its rotary embedding, compiled by numba.

A key at position t, of a run that begins at b, is R_t mean + R_b A^T z, where z are its components and A is the matrix
between them and keys. Its score is q . R_t mean + (A R_b^T q) . z: R_b^T turns the query back, and A R_b^T q is the
same for all tokens of a run. No key is made. A token costs its bytes made components, and a dot product over those of
them that have bits; the mean's part is a sum over pairs of dimensions, of the position's cosine and sine times what the
query makes of the mean. V's components are summed by weight, and what makes values of them comes after the sum, once
for each query.

Torch's meaning of it is in `codecs.shared.turning` and `codecs.klt.synthesis`. Where numba is not installed, nothing
imports this module.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import float32
from numpy.typing import NDArray
from torch import Tensor

from kvlab.codecs.klt.attention_numba import Seen, over_runs, weigh
from kvlab.codecs.klt.halves import lent
from kvlab.codecs.klt.reading import OK, Looked, RowReader
from kvlab.codecs.klt.reading_numba import TileLoop, in_threads, way_of
from kvlab.codecs.klt.tables_numba import StreamTables, tables_of
from kvlab.codecs.klt.tiles_numba import TILE, Active, Way, compiled, first_of
from kvlab.codecs.klt.vectors_numba import matrix_of, turned_round, unpack
from kvlab.codecs.shared.lanes_numba import LANES
from kvlab.codecs.shared.lines_numba import add_lines, products
from kvlab.codecs.shared.softmax_numba import add_exact, as_numbers, widen
from kvlab.codecs.shared.turning import RUN

NO_SINGLES = np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 0), np.bool_)
APART = TILE + 16  # columns of a tile: at powers of two rows drive each other out of the near cache


class ServedAttention:
    """Attention of few queries over the rows of one layer; all is computed in float32.

    Parameters
    ----------
    k, v : RowReader
        Of the layer, read by a `TileLoop`.
    """

    def __init__(self, k: RowReader, v: RowReader):
        ways = _for_queries(k.read.active, _constant_in_mean(k)), _constant_in_mean(v)
        self.k, self.v = (StreamTables(part.read.active, way) for part, way in zip((k, v), ways, strict=True))
        self.room = room_of(self.k, self.v, max(k.read.bytes, v.read.bytes) + 1)

    def __call__(
        self,
        rows: NDArray,
        first: int,
        x: Looked,
        q: Tensor,
        scale: float,
        turning: tuple[NDArray, NDArray],
        singles: tuple[NDArray, NDArray, NDArray] = NO_SINGLES,
        stored: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `reading_numba.TileAttention`, and means are of tokens that are kept exact, too.

        `singles` say which queries see which of them in `stored`; see `softmax_numba.add_exact`.
        """
        queries = numbers_of(q)
        mean, log_sum = np.zeros(queries.shape, np.float32), np.empty(queries.shape[:2], np.float32)
        reads = rows, x.slots, first, self.k.addresses, self.v.addresses, *turning, queries, scale, x.until
        kept = exact_numbers(stored, queries)
        ends = x.queries, *singles, kept, mean, log_sum
        if (threads := min(torch.get_num_threads(), len(x.runs))) < 2:
            serve(x.runs, *reads, self._room(), *ends)
        else:
            seen = nothing_seen(len(x.queries) * queries.shape[1], self.v.addresses)

            def part(number: int) -> None:
                runs = x.runs[len(x.runs) * number // threads : len(x.runs) * (number + 1) // threads]
                attend(runs, *reads, self._room(), seen)

            for _ in in_threads(part, threads):
                pass
            finish(seen, self.v.addresses, queries, scale, self._room(), *ends)
        return torch.from_numpy(mean), torch.from_numpy(log_sum)

    def _room(self) -> NDArray:
        """What `attend` works in."""
        return lent("served", (self.room,))


class ServedLoop(TileLoop):
    """Reads rows without escapes, and so has nothing to compile that escapes need."""

    def vectors(self, rows: NDArray, slots: NDArray, first: int, out: NDArray) -> int:
        """See `tiles_numba.vectors`."""
        bytes = lent("columns", (self.bytes + 1, TILE), np.uint8)
        vectors(rows, slots, first, self.active, bytes, lent("tile", (self.lines, APART)), out)
        return OK


def room_of(k: StreamTables, v: StreamTables, bytes: int) -> int:
    """Numbers in float32 that `parts_of` divides."""
    return k.way.mean.size * (k.way.mean.shape[1] + APART) + bytes * TILE // 4


@compiled
def parts_of(room, mean):
    """Room for a matrix [most, width], for components of a tile [most, APART], and for bytes uint8 [n, TILE].

    `most` is how many components there are, with bits or without, and `mean` that of K or V [groups, width].
    """
    most, width = mean.size, mean.shape[1]
    one, two = most * width, most * (width + APART)
    bytes = room[two:].view(np.uint8).reshape((-1, TILE))
    return room[:one].reshape((most, width)), room[one:two].reshape((most, APART)), bytes


def numbers_of(x: Tensor) -> NDArray:
    """A tensor as `widen` takes it, in one run: loops are compiled for each layout that they meet."""
    return np.ascontiguousarray(as_numbers(x if x.dtype == torch.bfloat16 else x.float()))


def exact_numbers(stored: Tensor | None, x: NDArray) -> NDArray:
    """Exact tokens as `softmax_numba.add_exact` and `store` take them beside x; none where none are kept."""
    return np.empty((2, 0, 1, 0, 1), x.dtype) if stored is None else as_numbers(stored)


def _constant_in_mean(reader: RowReader) -> Way:
    """The way from a stream's components to tokens less what is turned: those without bits are a constant beside it.

    `shift`, of which nothing without escapes has need, is that constant.
    """
    plan, loop = reader.plan, reader.read
    constant = torch.from_numpy(loop.active.constant).view(plan.groups, 1, plan.width)
    return way_of(plan, plan.back)._replace(shift=(constant @ plan.back.full())[:, 0].contiguous().numpy())


def _for_queries(a: Active, way: Way) -> Way:
    """A way whose matrix has a row for each dimension of a group, and columns of the components with bits alone.

    Those come first, in their order, and so do their factors; the other columns are zero.
    """
    width, halves, row = way.mean.shape[1], np.zeros_like(way.halves), np.zeros_like(way.row)
    for group in range(len(halves)):
        own = a.component[a.component // width == group] - group * width
        halves[group, :, : len(own)], row[group, : len(own)] = way.halves[group, own].T, way.row[group, own]
    return way._replace(halves=halves, row=row)


@compiled
def whole_vectors(count):
    """The least number of whole vectors' numbers that is not below a count."""
    return (count + LANES - 1) // LANES * LANES


@compiled
def _tile(rows, slots, first, bytes, a, room, wide, z):
    """Components with bits of at most `TILE` tokens, float32 [active, tokens]; `room` is uint8 [bytes + 1, TILE].

    Columns up to `wide` are made, those after the tokens' of bytes that are there by chance: numbers all the same.
    """
    columns, symbols = room[:bytes], room[bytes]
    turned_round(rows, slots, first, columns)
    unpack(columns, wide, a, symbols, z)


@compiled
def vectors(rows, slots, first, a, room, z, out):
    """Components of any number of tokens into float32 [groups, n, width + 1], as `tiles_numba.vectors` has them.

    `room` is uint8 [bytes + 1, TILE], and `z` float32 [active or more, APART].
    """
    width = out.shape[2] - 1
    for start in range(0, len(slots), TILE):
        own = slots[start : start + TILE]
        _tile(rows, own, first, len(room) - 1, a, room, whole_vectors(len(own)), z)
        for group in range(len(out)):
            for token in range(start, start + len(own)):
                for at in range(width):
                    out[group, token, at] = a.constant[group * width + at]
                out[group, token, width] = 0
        for number in range(len(a.component)):
            group, at = a.component[number] // width, a.component[number] % width
            for token in range(len(own)):
                out[group, start + token, at] = z[number, token]


@compiled
def _mean_of(q, heads, way, turned):
    """What cosines and sines count for in the scores of queries [rows, head_dim]: K's mean."""
    per, half, mean = heads // len(way.mean), q.shape[1] // 2, way.mean.reshape(-1)
    of_one = per * q.shape[1] // way.mean.shape[1]
    for row in range(len(q)):
        own = mean[row % heads // of_one * 2 * half :]
        for at in range(half):
            x, y = q[row, at], q[row, half + at]
            turned[row, at] = x * own[at] + y * own[half + at]
            turned[row, half + at] = y * own[at] - x * own[half + at]


@compiled
def _turned_back(q, cos, sin, position, out):
    """Queries [rows, head_dim] as those of a run's components, which begins at a position."""
    half, c, s = len(cos), cos[:, position].copy(), sin[:, position].copy()  # neighbours of a column lie far apart
    for row in range(len(q)):
        own, x, y = out[row], q[row, :half], q[row, half:]
        for at in range(half):
            own[at] = x[at] * c[at] + y[at] * s[at]
            own[half + at] = y[at] * c[at] - x[at] * s[at]


@compiled
def _absorb(q, heads, a, way, matrix, lines, constant):
    """What K's components and a constant count for in scores of queries [rows, head_dim] that were turned back.

    `matrix` [groups * width, width] is `_for_queries`, made numbers. Into `lines` [rows, width] and `constant` [rows].
    """
    groups, width = way.mean.shape
    head_dim, per = q.shape[1], heads // groups
    of_one = per * head_dim // width
    lines[:] = 0
    for begin in range(0, len(q), of_one):
        group, first = begin % heads // per, begin % heads % per // of_one * head_dim
        active, rest = first_of(group + 1, a) - first_of(group, a), way.shift[group, first : first + head_dim]
        own, to, top = q[begin : begin + of_one], lines[begin : begin + of_one], group * width + first
        add_lines(own, matrix[top : top + head_dim], 0, to[:, : min(whole_vectors(active), width)])
        for row in range(of_one):
            for number in range(active):
                to[row, number] *= way.row[group, number]
            total = float32(0)
            for at in range(head_dim):
                total += own[row, at] * rest[at]
            constant[begin + row] = total


@compiled
def _add_scores(lines, turned, constant, z, a, heads, cos, sin, position, scores, column):
    """Scores of tokens of one run, the first of them at a position and in a column of z, into [rows, tokens].

    `lines` and `constant` are of `_absorb`, and `turned` is of `_mean_of`.
    """
    groups, half, count = len(a.end), len(cos), len(lines)
    per = heads // groups
    for row in range(count):
        scores[row] = constant[row]
    for group in range(groups):
        low, high = first_of(group, a), first_of(group + 1, a)
        for one in range(group * per, count, heads):
            own = scores[one : one + per]
            add_lines(lines[one : one + per, : high - low], z[low:high], column, own)
            add_lines(turned[one : one + per, :half], cos, position, own)
            add_lines(turned[one : one + per, half:], sin, position, own)


@compiled
def _add_values(weights, wide, z, a, heads, found, total):
    """V's components of a tile's first `wide` tokens, by weights [rows + 2, tokens], added to `total` [rows, active].

    `found` is room, float32 [3, active or more].
    """
    groups, count = len(a.end), len(total)
    per = heads // groups
    for group in range(groups):
        low, high = first_of(group, a), first_of(group + 1, a)
        for one in range(group * per, count, heads):
            for row in range(one, one + per, 3):
                products(weights[row : row + 3], z[low:high], 0, wide, found)
                for more in range(min(3, one + per - row)):
                    for line in range(high - low):
                        total[row + more, low + line] += found[more, line]


@compiled
def nothing_seen(rows, v):
    """`Seen` of so many rows, V's components with bits alone."""
    top, weight = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)
    return Seen(top, weight, np.zeros((rows, len(tables_of(v)[0].component)), np.float32))


@compiled
def attend(runs, rows, slots, first, k, v, cos, sin, q, scale, until, room, seen):
    """Attention of queries over keys and values, a run of neighbouring tokens of one sequence after the other.

    Parameters
    ----------
    runs : array
        See `reading.Looked`.
    rows, slots : array
        All pages as rows, uint8 [slots, bytes], and which of them, int64 [n]; K's bytes come first.
    first : int
        Where V's bytes begin.
    k, v : array
        Of each stream (`tables_of`).
    cos, sin : array
        float32 [head_dim / 2, positions and fifteen more].
    q : array
        Queries [queries, heads, head_dim], as `widen` takes them; neighbouring heads share one of K and V.
    scale : float
        Of the scores.
    until : array
        The position at which the keys of each query end, int64 [queries].
    room : array
        To work in (`parts_of`).
    seen : Seen
        Of nothing, written.
    """
    if len(runs) == 0:
        return
    (ka, kw), (va, _) = tables_of(k), tables_of(v)
    matrix, z, columns = parts_of(room, kw.mean)
    half, heads, powers = len(cos), q.shape[1], np.empty(TILE, np.int32)
    floats, k_bytes, v_bytes = powers.view(np.float32), first, rows.shape[1] - first
    found = np.empty((3, len(z)), np.float32)
    matrix_of(kw.halves, kw.column, np.arange(len(matrix)), matrix)
    for begin, tokens, position, query, end, to in runs:
        count, mine = (end - query) * heads, slice(to * heads, (to + end - query) * heads)
        own = np.empty((count, 2 * half), np.float32)
        for row in range(count):
            widen(q[query + row // heads, row % heads], own[row], own[row].view(np.int32))
            for at in range(2 * half):
                own[row, at] *= float32(scale)
        top, weight, total = seen.top[mine], seen.weight[mine], seen.sum[mine]
        lines, turned = np.empty((count, kw.mean.shape[1]), np.float32), np.empty((count, 2 * half), np.float32)
        constant, back = np.empty(count, np.float32), np.empty_like(own)
        scores = np.zeros((count + 2, APART), np.float32)  # `products` takes three rows at once
        _mean_of(own, heads, kw, turned)
        absorbed = -1
        for start in range(0, tokens, TILE):
            now, at = slots[begin + start : begin + min(start + TILE, tokens)], position + start
            wide = whole_vectors(len(now))  # what is after the tokens weighs nothing
            _tile(rows, now, 0, k_bytes, ka, columns, wide, z)
            column = 0
            while column < len(now):  # a run after the other
                begun = (at + column) // RUN * RUN
                if begun != absorbed:
                    _turned_back(own, cos, sin, begun, back)
                    _absorb(back, heads, ka, kw, matrix, lines, constant)
                    absorbed = begun
                after = min(begun + RUN - at, len(now))
                stop = column + whole_vectors(after - column)  # the next run writes over what is after this one
                _add_scores(
                    lines, turned, constant, z, ka, heads, cos, sin, at + column, scores[:, column:stop], column
                )
                column = after
            for row in range(count):
                out = scores[row, :wide]
                known = min(max(until[query + row // heads] - at, 0), len(now))
                weigh(out, known, row, top, weight, total, powers, floats)
            _tile(rows, now, first, v_bytes, va, columns, wide, z)
            _add_values(scores, wide, z, va, heads, found, total)


@compiled
def finish(seen, v, q, scale, room, of_runs, singles, single_rows, single_seen, stored, mean, log_sum):
    """Means of values, and logarithms of the sums under them, of what runs have seen; to the means, exact tokens.

    Parameters
    ----------
    seen : Seen
        Of all runs.
    v : array
        Of V (`tables_of`).
    q, scale
        See `attend`.
    room : array
        To work in: the first numbers of it.
    of_runs : array
        The query of each of those that runs have, int64 [rows / heads].
    singles, single_rows, single_seen, stored
        See `softmax_numba.add_exact`.
    mean : array
        float32 [queries, heads, head_dim], of zeros, written; finite where a query saw nothing.
    log_sum : array
        float32 [queries, heads], written; -inf there.
    """
    a, way = tables_of(v)
    groups, width = way.mean.shape
    heads, head_dim = mean.shape[1:]
    flat, per = mean.reshape((-1, head_dim)), heads // groups
    of_one = per * head_dim // width
    total = np.zeros((len(flat), seen.sum.shape[1]), np.float32)
    over_runs(seen, of_runs, heads, total, log_sum.reshape(-1))
    matrix = room[: len(a.component) * width].reshape((-1, width))
    if len(seen.top):
        matrix_of(way.halves, way.row, a.component, matrix)
    for to in range(0, len(flat) if len(seen.top) else 0, of_one):
        group, first = to % heads // per, to % heads % per // of_one * head_dim
        low, high = first_of(group, a), first_of(group + 1, a)
        add_lines(total[to : to + of_one, low:high], matrix[low:high], first, flat[to : to + of_one])
        column, constant = way.column[group, first : first + head_dim], way.shift[group, first : first + head_dim]
        first_mean = way.mean[group, first : first + head_dim]
        for row in range(to, to + of_one):
            own = flat[row]
            for at in range(head_dim):
                own[at] = own[at] * column[at] + constant[at] + first_mean[at]
    add_exact(singles, single_rows, single_seen, q, stored, scale, mean, log_sum)


@compiled
def serve(
    runs,
    rows,
    slots,
    first,
    k,
    v,
    cos,
    sin,
    q,
    scale,
    until,
    room,
    of_runs,
    singles,
    single_rows,
    single_seen,
    stored,
    mean,
    log_sum,
):
    """`attend` to all runs, and `finish`: to hand over what a call takes costs as much as reading many tokens."""
    seen = nothing_seen(len(of_runs) * q.shape[1], v)
    attend(runs, rows, slots, first, k, v, cos, sin, q, scale, until, room, seen)
    finish(seen, v, q, scale, room, of_runs, singles, single_rows, single_seen, stored, mean, log_sum)
