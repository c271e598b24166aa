"""Attention of few queries over `klt`'s rows, compiled by numba: what reads K's tokens and V's components by tiles.

Scores of a tile are taken while its keys are near, made weights against the largest score so far (Milakov and
Gimelshein 2018, arXiv 1805.02867), and V's components summed by them. Where numba is not installed, nothing imports
this module.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float32
from numpy.typing import NDArray

from kvlab.codecs.klt.reading import OK
from kvlab.codecs.klt.tiles_numba import TILE, compiled, tile
from kvlab.codecs.klt.vectors_numba import floats_of
from kvlab.codecs.shared.lines_numba import products
from kvlab.codecs.shared.softmax_numba import exponentials, widen


class Turned(NamedTuple):
    """What K is before scores: its mean is added, and it is turned by its position (RoFormer, arXiv 2104.09864).

    Parameters
    ----------
    mean : array
        float32 [kv_heads * head_dim].
    cos, sin : array
        float32 [head_dim / 2, positions]; of no positions where nothing is turned.
    half : int
        head_dim / 2.
    """

    mean: NDArray
    cos: NDArray
    sin: NDArray
    half: int


class Seen(NamedTuple):
    """What queries have seen of a run of keys: a row for each query of the run, and each of its heads.

    Parameters
    ----------
    top, weight : array
        The largest score, and the sum of the exponentials of all less that one, float32 [rows].
    sum : array
        V's components by these weights, and after them the second means', float32 [rows, width + 1]; where nothing is
        escaped those with bits alone, float32 [rows, active].
    """

    top: NDArray
    weight: NDArray
    sum: NDArray


@compiled
def _turn(k, row, start, position, t, low, high, low_ints, high_ints):
    """Keys `start`, `start` + 1, ... of K's row and of the one that it is turned with, into `low` and `high`."""
    half = t.half
    pair, other = row % (2 * half), row + half
    widen(k[row, start : start + len(low)], low, low_ints)
    widen(k[other, start : start + len(low)], high, high_ints)
    more, further = t.mean[row], t.mean[other]
    if t.cos.shape[1] == 0:
        for token in range(len(low)):
            low[token], high[token] = low[token] + more, high[token] + further
        return
    c, s = t.cos[pair, position : position + len(low)], t.sin[pair, position : position + len(low)]
    for token in range(len(low)):
        x, y = low[token] + more, high[token] + further
        low[token] = x * c[token] - y * s[token]
        high[token] = y * c[token] + x * s[token]


@compiled
def _scores(k, start, count, position, t, heads, q, keys, ints, scores):
    """Scores of queries [rows, head_dim] at `count` keys from `start` on, the first of them at `position`.

    `keys` is room for what is turned at once, float32 [4, TILE], and `ints` its bits.
    """
    half = q.shape[1] // 2
    kv_heads = len(t.mean) // (2 * half)
    per = heads // kv_heads
    for row in range(len(q)):
        for token in range(count):
            scores[row, token] = 0
    one, two, three, four = keys[0, :count], keys[1, :count], keys[2, :count], keys[3, :count]
    for head in range(kv_heads):
        for pair in range(0, half, 2):
            first, several = head * 2 * half + pair, pair + 1 < half
            _turn(k, first, start, position, t, one, two, ints[0], ints[1])
            if several:
                _turn(k, first + 1, start, position, t, three, four, ints[2], ints[3])
            for query in range(head * per, len(q), heads):
                for row in range(query, query + per):
                    own, x, y = scores[row], q[row, pair], q[row, pair + half]
                    if several:
                        z, w = q[row, pair + 1], q[row, pair + 1 + half]
                        for token in range(count):
                            own[token] += x * one[token] + y * two[token] + z * three[token] + w * four[token]
                    else:
                        for token in range(count):
                            own[token] += x * one[token] + y * two[token]


@compiled
def weigh(scores, end, row, tops, weights, sums, powers, floats):
    """Make the first `end` scores weights, and the others 0; what the row has seen so far is scaled (`Seen`)."""
    for token in range(end, len(scores)):
        scores[token] = 0
    top = tops[row]
    for token in range(end):
        top = max(top, scores[token])
    if top > tops[row]:
        less = np.exp(tops[row] - top)
        weights[row] *= less
        for at in range(sums.shape[1]):
            sums[row, at] *= less
        tops[row] = top
    weights[row] += exponentials(scores[:end], top, powers, floats)


@compiled
def _sum(weights, count, heads, a, z, further, beside, seen):
    """Add components of a tile's `count` tokens, by weights [rows + 2, TILE], to what the rows have seen."""
    groups, queries = len(a.end), len(seen.top) // heads
    width, per = len(a.place) // groups, heads // groups
    found = np.empty((3, len(z)), np.float32)
    for group in range(groups):
        begin, end = 0 if group == 0 else a.end[group - 1] + 2, a.end[group] + 2
        for query in range(group * per, heads * queries, heads):
            for row in range(query, query + per, 3):
                several = min(3, query + per - row)
                products(weights[row : row + 3], z[begin:end], 0, count, found)
                for number in range(several):
                    out = seen.sum[row + number]
                    for line in range(begin, end - 2):
                        out[a.component[line - 2 * group] - group * width] += found[number, line - begin]
                    for at in range(width):
                        out[at] += found[number, end - 2 - begin] * a.constant[group * width + at]
                    out[width] += found[number, end - 1 - begin]
    for at in range(beside):
        group = further.component[at] // width
        for query in range(group * per, heads * queries, heads):
            for row in range(query, query + per):
                value = weights[row, further.token[at]] * further.value[at]
                seen.sum[row, further.component[at] - group * width] += value


@compiled
def attend(runs, rows, slots, first, a, e, columns, symbols, z, further, k, t, heads, q, until, seen):
    """Attention of queries over keys and values, a run of neighbouring tokens of one sequence after the other.

    Parameters
    ----------
    runs : array
        Of each the first of its tokens in `slots` and `k`, how many they are, the position of the first, the first and
        the last one of its queries, and where these begin in `seen`, int64 [runs, 6].
    rows, slots, first, a, e, columns, symbols, z, further
        V's tokens: see `tile`.
    k : array
        K's tokens before `t` [kv_heads * head_dim, n], float32, or bfloat16 as its bits, uint16.
    t : Turned
        What is done to them.
    heads : int
        Of queries; neighbouring ones share one of K and V.
    q : array
        Queries, scaled, float32 [queries * heads, head_dim].
    until : array
        The position at which the keys of each query end, int64 [queries].
    seen : Seen
        Of nothing, written.

    Returns
    -------
    int
        OK, or what is wrong with the first row that cannot be.
    """
    powers, keys = np.empty(TILE, np.int32), np.empty((4, TILE), np.float32)
    floats, ints = powers.view(np.float32), keys.view(np.int32)
    for begin, tokens, position, query, end, to in runs:
        own, mine = q[query * heads : end * heads], slice(to * heads, (to + end - query) * heads)
        saw = Seen(seen.top[mine], seen.weight[mine], seen.sum[mine])
        scores = np.zeros((len(own) + 2, TILE), np.float32)  # `products` takes three rows at once
        for start in range(0, tokens, TILE):
            count = min(TILE, tokens - start)
            _scores(k, begin + start, count, position + start, t, heads, own, keys, ints, scores)
            for row in range(len(own)):
                known = min(max(until[query + row // heads] - position - start, 0), count)
                weigh(scores[row, :count], known, row, saw.top, saw.weight, saw.sum, powers, floats)
            now = slots[begin + start : begin + start + count]
            beside = tile(rows, now, first, a, e, columns, symbols, z, further)
            if beside < 0:
                return -beside
            _sum(scores, count, heads, a, z, further, beside, saw)
    return OK


@compiled
def over_runs(seen, of_runs, heads, total, log_sum):
    """Means of V's components over all runs of a query, into zeros [queries * heads, columns]; also `log_sum`."""
    weight = np.zeros(len(total), np.float32)
    log_sum[:] = -np.inf
    for row in range(len(seen.top)):
        to = of_runs[row // heads] * heads + row % heads
        log_sum[to] = max(log_sum[to], seen.top[row])
    for row in range(len(seen.top)):
        to = of_runs[row // heads] * heads + row % heads
        if seen.weight[row] > 0:
            share = np.exp(seen.top[row] - log_sum[to])
            weight[to] += share * seen.weight[row]
            for at in range(total.shape[1]):
                total[to, at] += share * seen.sum[row, at]
    for to in range(len(total)):
        log_sum[to] += np.log(weight[to])
        less = float32(1) / weight[to] if weight[to] > 0 else float32(0)
        for at in range(total.shape[1]):
            total[to, at] *= less


@compiled
def finish(seen, of_runs, heads, way, mean, log_sum):
    """Means of values, and logarithms of the sums under them, of what runs have seen.

    Parameters
    ----------
    seen : Seen
        Of all runs.
    of_runs : array
        The query of each of those that runs have, int64 [rows / heads].
    heads : int
        Of queries.
    way : Way
        From V's components to values.
    mean : array
        float32 [queries * heads, head_dim], of zeros, written; finite where a query saw nothing.
    log_sum : array
        float32 [queries * heads], written; -inf there.
    """
    groups, width = way.mean.shape
    total = np.zeros((len(mean), width + 1), np.float32)
    over_runs(seen, of_runs, heads, total, log_sum)
    head_dim, per = mean.shape[1], heads // groups
    heads_of_one = per * head_dim // width
    numbers = np.empty(width, np.float32)
    for group in range(groups):
        for component in range(width):
            floats_of(way.halves[group, component], way.row[group, component], numbers)
            for query in range(group * per, len(mean), heads):
                for number in range(per):
                    first, weighed = number // heads_of_one * head_dim, total[query + number, component]
                    own, part = mean[query + number], numbers[first : first + head_dim]
                    for at in range(head_dim):
                        own[at] += weighed * part[at]
        for query in range(group * per, len(mean), heads):
            for number in range(per):
                first, second = number // heads_of_one * head_dim, total[query + number, width]
                own, last = mean[query + number], first + head_dim
                column, shift = way.column[group, first:last], way.shift[group, first:last]
                for at in range(head_dim):
                    own[at] = own[at] * column[at] + way.mean[group, first:last][at] + second * shift[at]
