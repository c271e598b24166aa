r"""Dual Chunk Attention: every key is read, and no relative position is larger than those that were trained.

An, Huang, Zhang, Gong, Qiu, Zhou and Kong 2024 (arXiv 2402.17463). With chunks of s tokens and c trained positions,
s < c, the key at position j is rotated to j mod s, whoever reads it. The query at i is rotated by where the key lies:

======================  ============================  ======================================
key's chunk             the query's position          relative position
======================  ============================  ======================================
the same                i mod s                       i - j
the one before          min(s + (i mod s), c - 1)     i - j while that is at most c - s
farther                 c - 1                         c - 1 - (j mod s)
======================  ============================  ======================================

The three parts have a softmax each, which their sums of exponentials put together as one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.attention.grouped import grouped, positions
from kvlab.core.errors import UserError

Rotate = Callable[[Tensor, Tensor], Tensor]
"""(batch, heads, tokens, head_dim) and int64 positions [tokens] -> the same, turned by the rotary embedding."""


def query_positions(at: Tensor, chunk: int, trained: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where queries stand for keys of their own chunk, of the one before, and of those farther, [queries] each.

    Raises
    ------
    UserError
        A chunk is not shorter than the trained context.
    """
    if not 0 < chunk < trained:
        raise UserError(f"chunks of {chunk} tokens and {trained} trained positions; allowed: 0 < chunk < trained")
    own = at % chunk
    return own, (chunk + own).clamp(max=trained - 1), torch.full_like(at, trained - 1)


def dual_chunk(
    q: Tensor, k: Tensor, v: Tensor, rotate: Rotate, chunk: int, trained: int, scale: float | None = None
) -> Tensor:
    """Attention of queries that are the last of the tokens.

    Parameters
    ----------
    q : Tensor, shape (batch, heads, queries, head_dim)
        Before the rotary embedding, as is `k`.
    k, v : Tensor, shape (batch, kv_heads, keys, head_dim)

    Returns
    -------
    Tensor, shape (batch, heads, queries, head_dim)
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    at, place = positions(q, k), torch.arange(k.shape[2], device=q.device)
    back = at[:, None] // chunk - place[None] // chunk
    turned = rotate(k, place % chunk)
    near = (back == 0) & (place[None] <= at[:, None])
    masks = (near, back == 1, back > 1)
    stands = query_positions(at, chunk, trained)
    parts = [
        part(rotate(q, where), turned, v, mask, scale) for where, mask in zip(stands, masks, strict=True) if mask.any()
    ]
    return merged(parts).flatten(1, 2)


def part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over some of the keys, and the logarithm of its sum of exponentials.

    (batch, kv_heads, group, queries, head_dim) and (..., queries, 1); zeros and minus infinity where nothing is read.
    """
    found = (grouped(q, k.shape[1]) @ k.transpose(2, 3)[:, :, None] * scale).masked_fill(~mask, float("-inf"))
    total = found.logsumexp(-1, keepdim=True)
    weights = (found - total.nan_to_num(neginf=0.0)).exp()
    return weights @ v[:, :, None], total


def merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Parts of one softmax put together: outputs weighed by their shares of the sum of exponentials."""
    shares = torch.cat([total for _, total in parts], dim=-1).softmax(-1)
    return sum(out * shares[..., i : i + 1] for i, (out, _) in enumerate(parts))
