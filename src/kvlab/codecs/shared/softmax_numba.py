"""Softmax by loops that numba compiles: exponentials, and attention of single queries over tokens that are kept exact.

Where numba is not installed, nothing imports this module.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import float32, int32
from numpy.typing import NDArray
from torch import Tensor

from kvlab.codecs.shared.compiled import compiled
from kvlab.codecs.shared.lines_numba import add_lines, products


@compiled
def exponentials(scores, top, powers, floats):
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


def as_numbers(x: Tensor) -> NDArray:
    """A tensor's memory, as `widen` takes it: bfloat16 as its bits."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


@compiled
def widen(part, out, ints):
    """Numbers, float32 or bfloat16 as its bits, uint16, into float32 `out`, whose bits are `ints`."""
    if part.itemsize == 2:
        for at in range(len(out)):
            ints[at] = int32(part[at]) << int32(16)
    else:
        for at in range(len(out)):
            out[at] = part[at]


@compiled
def store(k, v, sources, rows, places, to):
    """Put tokens `sources` of k and v [tokens, kv_heads, head_dim] at places of rows of `add_exact`'s `stored`."""
    for number in range(len(sources)):
        for head in range(k.shape[1]):
            for at in range(k.shape[2]):
                to[0, rows[number], head, places[number], at] = k[sources[number], head, at]
                to[1, rows[number], head, places[number], at] = v[sources[number], head, at]


@compiled
def _weights(scores, seen, powers, floats):
    """Make scores weights, 0 where they are not seen; the largest score that is, and the sum of the weights."""
    top = float32(-np.inf)
    for at in range(len(scores)):
        scores[at] = scores[at] if seen[at] else float32(-np.inf)
        top = max(top, scores[at])
    exponentials(scores, top, powers, floats)
    found = float32(0)
    for at in range(len(scores)):
        scores[at] = scores[at] if seen[at] else float32(0)
        found += scores[at]
    return top, found


@compiled
def add_exact(queries, rows, seen, q, stored, scale, mean, log_sum):
    """Add to attention of single queries what they see of the tokens that are kept of their request.

    Parameters
    ----------
    queries, rows : array
        Which of `q`, and the row of each among requests, int64 [n].
    seen : array
        Which places each sees, bool [n, places].
    q : array
        Queries [tokens, heads, head_dim], as `widen` takes them.
    stored : array
        K and V of all requests [2, rows, kv_heads, places, head_dim], as `widen` takes them.
    scale : float
        Of the scores.
    mean : array
        Attention over other tokens, float32 [tokens, heads, head_dim], finite; written, that over both.
    log_sum : array
        Of those other tokens alone, float32 [tokens, heads]; -inf where there are none.
    """
    kv_heads, places, head_dim = stored.shape[2:]
    heads = q.shape[1]
    per = heads // kv_heads
    tokens, own = np.empty(places * head_dim, np.float32), np.zeros((3, head_dim), np.float32)
    ints, bits, as_rows = tokens.view(np.int32), own.view(np.int32), tokens.reshape((places, head_dim))
    powers, scores, weights = (
        np.empty(places, np.int32),
        np.empty((3, places), np.float32),
        np.empty((per, places), np.float32),
    )
    floats, total = powers.view(np.float32), np.empty((per, head_dim), np.float32)
    tops, sums = np.empty(per, np.float32), np.empty(per, np.float32)
    for number in range(len(queries)):
        query, row, looked = queries[number], rows[number], seen[number]
        if not looked.any():
            continue
        for head in range(kv_heads):
            widen(stored[0, row, head].reshape(-1), tokens, ints)
            for first in range(0, per, 3):
                several = min(3, per - first)
                for more in range(several):
                    widen(q[query, head * per + first + more], own[more], bits[more])
                products(own, as_rows, 0, head_dim, scores)
                for more in range(several):
                    out = weights[first + more]
                    for at in range(places):
                        out[at] = scores[more, at] * float32(scale)
                    tops[first + more], sums[first + more] = _weights(out, looked, powers, floats)
            widen(stored[1, row, head].reshape(-1), tokens, ints)
            total[:] = 0
            add_lines(weights, as_rows, 0, total)
            for more in range(per):
                to = head * per + more
                found = tops[more] + np.log(sums[more])
                before = log_sum[query, to]
                share = float32(1) / (float32(1) + np.exp(before - found))  # of what is added now
                own_share = share / sums[more]
                for dim in range(head_dim):
                    mean[query, to, dim] += own_share * total[more, dim] - share * mean[query, to, dim]
