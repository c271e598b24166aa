"""Attention of few queries over `klt`'s rows, compiled by numba: what reads K's tokens and V's components by tiles.

Scores of a tile are taken while its keys are near, made weights against the largest score so far (Milakov and
Gimelshein 2018, arXiv 1805.02867), and V's components summed by them. Where numba is not installed, nothing imports
this module.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float32, int32
from numpy.typing import NDArray

from kvlab.codecs.klt.reading import OK
from kvlab.codecs.klt.tiles_numba import TILE, compiled, floats_of, tile


class Turned(NamedTuple):
    """What K is before scores: its mean is added, and it is turned by its position (RoFormer, arXiv 2104.09864).

    Parameters
    ----------
    mean : array
        float32 [kv_heads * head_dim].
    cos, sin : array
        float32 [head_dim / 2, positions]; of no positions where nothing is turned.
    """

    mean: NDArray
    cos: NDArray
    sin: NDArray


class Seen(NamedTuple):
    """What queries have seen of a run of keys: a row for each query of the run, and each of its heads.

    Parameters
    ----------
    top, weight : array
        The largest score, and the sum of the exponentials of all less that one, float32 [rows].
    sum : array
        V's components by these weights, and after them the second means', float32 [rows, width + 1].
    """

    top: NDArray
    weight: NDArray
    sum: NDArray


@compiled
def _scores(k, start, count, position, t, heads, q, low, high, scores):
    """Scores of queries [rows, head_dim] at `count` keys from `start` on, the first of them at `position`."""
    half = q.shape[1] // 2
    kv_heads = len(t.mean) // (2 * half)
    per, turning = heads // kv_heads, t.cos.shape[1] > 0
    for row in range(len(q)):
        for token in range(count):
            scores[row, token] = 0
    for head in range(kv_heads):
        for pair in range(half):
            first = head * 2 * half + pair
            a, b = k[first, start : start + count], k[first + half, start : start + count]
            more, other = t.mean[first], t.mean[first + half]
            if turning:
                c, s = t.cos[pair, position : position + count], t.sin[pair, position : position + count]
                for token in range(count):
                    x, y = a[token] + more, b[token] + other
                    low[token] = x * c[token] - y * s[token]
                    high[token] = y * c[token] + x * s[token]
            else:
                for token in range(count):
                    low[token], high[token] = a[token] + more, b[token] + other
            for query in range(head * per, len(q), heads):
                for row in range(query, query + per):
                    x, y = q[row, pair], q[row, pair + half]
                    for token in range(count):
                        scores[row, token] += x * low[token] + y * high[token]


@compiled
def _exponentials(scores, top, powers, floats):
    """exp(scores - top) in the place of scores, none of which is above `top`, and their sum.

    2 to a whole number by its exponent, and to what is left, at most one half, by seven terms of the series: exact to
    2e-7 of it. What is below 2**-126 is that. `floats` is a view of `powers`.
    """
    for token in range(len(scores)):
        x = max((scores[token] - top) * float32(1.4426950408889634), float32(-126))
        whole = np.floor(x + float32(0.5))
        powers[token] = (int32(whole) + 127) << 23
        x -= whole
        y = float32(0.00015403530) * x + float32(0.0013333558)
        y = y * x + float32(0.0096181291)
        y = y * x + float32(0.055504109)
        y = y * x + float32(0.24022651)
        y = y * x + float32(0.69314718)
        scores[token] = y * x + float32(1)
    found = float32(0)
    for token in range(len(scores)):
        scores[token] *= floats[token]
        found += scores[token]
    return found


@compiled
def _weigh(scores, end, row, seen, powers, floats):
    """Make the first `end` scores weights, and the others 0; what the row has seen so far is scaled."""
    for token in range(end, len(scores)):
        scores[token] = 0
    top = seen.top[row]
    for token in range(end):
        top = max(top, scores[token])
    if top > seen.top[row]:
        less = np.exp(seen.top[row] - top)
        seen.weight[row] *= less
        for at in range(seen.sum.shape[1]):
            seen.sum[row, at] *= less
        seen.top[row] = top
    seen.weight[row] += _exponentials(scores[:end], top, powers, floats)


@compiled
def _products(weights, z, count, out):
    """Sums of the rows of z by the weights of `count` tokens, of three queries at once, into float32 [3, rows]."""
    for line in range(len(z)):
        one, other, last = float32(0), float32(0), float32(0)
        for token in range(count):
            one += weights[0, token] * z[line, token]
            other += weights[1, token] * z[line, token]
            last += weights[2, token] * z[line, token]
        out[0, line], out[1, line], out[2, line] = one, other, last


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
                _products(weights[row : row + 3], z[begin:end], count, found)
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
        K's tokens before `t`, float32 [kv_heads * head_dim, n].
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
    low, high, powers = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.int32)
    floats = powers.view(np.float32)
    for begin, tokens, position, query, end, to in runs:
        own, mine = q[query * heads : end * heads], slice(to * heads, (to + end - query) * heads)
        saw = Seen(seen.top[mine], seen.weight[mine], seen.sum[mine])
        scores = np.zeros((len(own) + 2, TILE), np.float32)  # `_products` takes three rows at once
        for start in range(0, tokens, TILE):
            count = min(TILE, tokens - start)
            _scores(k, begin + start, count, position + start, t, heads, own, low, high, scores)
            for row in range(len(own)):
                known = min(max(until[query + row // heads] - position - start, 0), count)
                _weigh(scores[row, :count], known, row, saw, powers, floats)
            now = slots[begin + start : begin + start + count]
            beside = tile(rows, now, first, a, e, columns, symbols, z, further)
            if beside < 0:
                return -beside
            _sum(scores, count, heads, a, z, further, beside, saw)
    return OK


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
    weight, total = np.zeros(len(mean), np.float32), np.zeros((len(mean), width + 1), np.float32)
    log_sum[:] = -np.inf
    for row in range(len(seen.top)):
        to = of_runs[row // heads] * heads + row % heads
        log_sum[to] = max(log_sum[to], seen.top[row])
    for row in range(len(seen.top)):
        to = of_runs[row // heads] * heads + row % heads
        if seen.weight[row] > 0:
            share = np.exp(seen.top[row] - log_sum[to])
            weight[to] += share * seen.weight[row]
            for at in range(width + 1):
                total[to, at] += share * seen.sum[row, at]
    for to in range(len(mean)):
        log_sum[to] += np.log(weight[to])
        less = float32(1) / weight[to] if weight[to] > 0 else float32(0)
        for at in range(width + 1):
            total[to, at] *= less
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
