"""Attention of few queries over rows of `klt` whose K was coded after its rotary embedding, compiled by numba.

What stands between K's components and a score is then the same for all tokens, so it goes into the query: a key at
position t is R_t mean + z inverse (+ shift), and its score q . R_t mean + (inverse q) . z (+ q . shift). So no key is
made. A token costs its bytes made components, and a dot product over those of them that have bits. The mean's part is a
sum over pairs of dimensions, of the position's cosine and sine times what the query makes of the mean.

Torch's meaning of it is in `codecs.shared.turning` and `codecs.klt.synthesis`. Where numba is not installed, nothing
imports this module.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float32
from numpy.typing import NDArray

from kvlab.codecs.klt.attention_numba import Seen, _sum, _weigh
from kvlab.codecs.klt.reading import OK
from kvlab.codecs.klt.tiles_numba import TILE, compiled, tile
from kvlab.codecs.klt.vectors_numba import floats_of


class Absorbed(NamedTuple):
    """Queries with K's way back in them.

    Parameters
    ----------
    lines : array
        What each row of a tile of K counts for, float32 [queries * heads, active + 2 * groups].
    components : array
        The same of all components of the query's group [queries * heads, width].
    turned : array
        Of the position's cosines and then of its sines [queries * heads, head_dim].
    """

    lines: NDArray
    components: NDArray
    turned: NDArray


@compiled
def absorb(q, heads, way, a, to):
    """Queries, scaled, float32 [queries * heads, head_dim], into `Absorbed` whose `lines` are zeros.

    `way` and `a` are K's (`tiles_numba.Way`, `Active`); neighbouring heads of queries share one of K.
    """
    groups, width = way.shift.shape
    head_dim, per = q.shape[1], heads // groups
    of_one, half = per * head_dim // width, head_dim // 2
    numbers = np.empty(width, np.float32)
    for group in range(groups):
        scale = a.end[group]
        for component in range(width):
            floats_of(way.halves[group, component], way.row[group, component], numbers)
            for at in range(width):
                numbers[at] *= way.column[group, at]
            line, constant = a.place[group * width + component], a.constant[group * width + component]
            for query in range(group * per, len(q), heads):
                for row in range(query, query + per):
                    first, own, total = (row - query) // of_one * head_dim, q[row], float32(0)
                    part = numbers[first : first + head_dim]
                    for at in range(head_dim):
                        total += own[at] * part[at]
                    to.components[row, component] = total
                    if line >= 0:
                        to.lines[row, line] = total
                    else:
                        to.lines[row, scale] += constant * total
        for query in range(group * per, len(q), heads):
            for row in range(query, query + per):
                first, own, total = (row - query) // of_one * head_dim, q[row], float32(0)
                shift, mean = way.shift[group, first : first + head_dim], way.mean[group, first : first + head_dim]
                for at in range(head_dim):
                    total += own[at] * shift[at]
                to.lines[row, scale + 1] = total
                for at in range(half):
                    to.turned[row, at] = own[at] * mean[at] + own[half + at] * mean[half + at]
                    to.turned[row, half + at] = own[half + at] * mean[at] - own[at] * mean[half + at]


@compiled
def _add(weights, lines, out):
    """Add lines [n, tokens or more] by weights [n] to `out` [tokens]; four lines at once."""
    whole = len(weights) // 4 * 4
    for line in range(0, whole, 4):
        w, x, y, z = weights[line], weights[line + 1], weights[line + 2], weights[line + 3]
        a, b, c, d = lines[line], lines[line + 1], lines[line + 2], lines[line + 3]
        for token in range(len(out)):
            out[token] += w * a[token] + x * b[token] + y * c[token] + z * d[token]
    for line in range(whole, len(weights)):
        w, a = weights[line], lines[line]
        for token in range(len(out)):
            out[token] += w * a[token]


@compiled
def attend(runs, rows, slots, first, k, v, cos, sin, heads, absorbed, until, seen):
    """Attention of queries over keys and values, a run of neighbouring tokens of one sequence after the other.

    Parameters
    ----------
    runs : array
        See `attention_numba.attend`; the first of a run's tokens is counted in `slots`.
    rows, slots, first
        See `tiles_numba.tile`; K's bytes come first, V's begin at `first`.
    k, v : tuple
        Of each stream what `tile` reads and what it works in; the room may be the same.
    cos, sin : array
        float32 [head_dim / 2, positions].
    heads : int
        Of queries; neighbouring ones share one of K and V.
    absorbed : Absorbed
        The queries.
    until : array
        The position at which the keys of each query end, int64 [queries].
    seen : Seen
        Of nothing, written.

    Returns
    -------
    int
        OK, or what is wrong with the first row that cannot be.
    """
    ka, ke, k_columns, k_symbols, k_z, k_further = k
    va, ve, v_columns, v_symbols, v_z, v_further = v
    groups, half = len(ka.end), len(cos)
    width, per = len(ka.place) // groups, heads // groups
    powers = np.empty(TILE, np.int32)
    floats = powers.view(np.float32)
    for begin, tokens, position, query, end, to in runs:
        mine = slice(to * heads, (to + end - query) * heads)
        saw, own = Seen(seen.top[mine], seen.weight[mine], seen.sum[mine]), (end - query) * heads
        scores = np.empty((own + 2, TILE), np.float32)  # the last two are zeros: `_products` takes three rows at once
        scores[own:] = 0
        for start in range(0, tokens, TILE):
            count = min(TILE, tokens - start)
            now, at = slots[begin + start : begin + start + count], position + start
            beside = tile(rows, now, 0, ka, ke, k_columns, k_symbols, k_z, k_further)
            if beside < 0:
                return -beside
            for row in range(own):
                out, source = scores[row, :count], query * heads + row
                out[:] = 0
                group = row % heads // per
                low, high = 0 if group == 0 else ka.end[group - 1] + 2, ka.end[group] + 2
                _add(absorbed.lines[source, low:high], k_z[low:high], out)
                _add(absorbed.turned[source, :half], cos[:, at : at + count], out)
                _add(absorbed.turned[source, half:], sin[:, at : at + count], out)
            for number in range(beside):
                group, component = k_further.component[number] // width, k_further.component[number] % width
                token, value = k_further.token[number], k_further.value[number]
                for one in range(group * per, own, heads):
                    for row in range(one, one + per):
                        scores[row, token] += absorbed.components[query * heads + row, component] * value
            for row in range(own):
                known = min(max(until[query + row // heads] - at, 0), count)
                _weigh(scores[row, :count], known, row, saw, powers, floats)
            beside = tile(rows, now, first, va, ve, v_columns, v_symbols, v_z, v_further)
            if beside < 0:
                return -beside
            _sum(scores, count, heads, va, v_z, v_further, beside, saw)
    return OK
