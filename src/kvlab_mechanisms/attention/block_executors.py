"""Three ways to run block-sparse attention that mean the same: a mask, a gather, and torch's flex attention.

`masked` computes every score and throws most away: the reference, for quality. `gathered` reads the chosen keys alone:
for decoding, where the queries are few. `flexed` hands the choice to `torch.nn.attention.flex_attention` (Dong et al.
2024, arXiv 2412.05496), which skips blocks where it is compiled, on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kvlab.attention.block_sparse import Blocks, allowed, choose, local_from
from kvlab.attention.grouped import attend, grouped, positions
from kvlab.attention.patterns import BlockSparse

Executor = Callable[..., Tensor]


def masked(
    q: Tensor, k: Tensor, v: Tensor, pattern: BlockSparse, scale: float | None = None, blocks: Blocks | None = None
) -> Tensor:
    """By a boolean mask.

    Parameters
    ----------
    q : Tensor, shape (batch, heads, queries, head_dim)
        The last of the tokens.
    k, v : Tensor, shape (batch, kv_heads, keys, head_dim)
    scale : float, optional
        Of the scores; default: head_dim to the power of -1/2.
    blocks : Blocks, optional
        Of `k`, where they are known already.

    Returns
    -------
    Tensor, shape (batch, heads, queries, head_dim)
    """
    return attend(q, k, v, allowed(q, k, pattern, blocks), scale)


def gathered(
    q: Tensor, k: Tensor, v: Tensor, pattern: BlockSparse, scale: float | None = None, blocks: Blocks | None = None
) -> Tensor:
    """By reading what is chosen; as `masked`."""
    places, valid = _places(q, k, pattern, blocks)
    batch, heads, queries, reads = places.shape

    def read(x: Tensor) -> Tensor:
        """Keys or values by query, (batch * kv_heads * queries, 1, reads, head_dim)."""
        index = places.reshape(batch, heads, -1, 1).expand(-1, -1, -1, x.shape[3])
        return x.gather(2, index).reshape(-1, 1, reads, x.shape[3])

    asked = grouped(q, heads).transpose(2, 3).reshape(batch * heads * queries, 1, -1, q.shape[3])
    mask = valid.reshape(-1, 1, 1, reads)
    found = functional.scaled_dot_product_attention(asked, read(k), read(v), attn_mask=mask, scale=scale)
    return found.reshape(batch, heads, queries, -1, v.shape[3]).transpose(2, 3).flatten(1, 2)


def _places(q: Tensor, k: Tensor, pattern: BlockSparse, blocks: Blocks | None) -> tuple[Tensor, Tensor]:
    """Positions that each query reads, (batch, kv_heads, queries, reads), and which of them count: each once."""
    at, inner = positions(q, k), torch.arange(pattern.block, device=q.device)
    start = local_from(at, pattern)[:, None]
    chosen = choose(q, k, pattern, blocks)
    far = (chosen.numbers[..., None] * pattern.block + inner).flatten(3)
    counts = chosen.valid.repeat_interleave(pattern.block, dim=3) & (far < start)
    sunk = torch.arange(pattern.sinks * pattern.block, device=q.device).expand(len(at), -1)
    near = start + torch.arange(max(pattern.window, pattern.block), device=q.device)
    fixed = torch.cat([sunk, near], dim=1)
    always = torch.cat([sunk < start, near <= at[:, None]], dim=1)
    shape = (*far.shape[:2], *fixed.shape)
    places = torch.cat([far, fixed.expand(shape)], dim=3).clamp(0, k.shape[2] - 1)
    return places, torch.cat([counts, always.expand(shape)], dim=3)


def flexed(
    q: Tensor, k: Tensor, v: Tensor, pattern: BlockSparse, scale: float | None = None, blocks: Blocks | None = None
) -> Tensor:
    """By flex attention; as `masked`."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    read, group = allowed(q, k, pattern, blocks), q.shape[1] // k.shape[1]

    def reads(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query head reads a key."""
        return read[batch, head // group, query, key]

    mask = create_block_mask(reads, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device=q.device.type)
    return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


EXECUTORS: dict[str, Executor] = {"masked": masked, "gathered": gathered, "flexed": flexed}
