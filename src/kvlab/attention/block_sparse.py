r"""Block-sparse attention without training: which blocks each query reads.

After Native Sparse Attention (Yuan et al. 2025, arXiv 2502.11089), of which the trained gates are left out; blocks are
scored by their mean key (Lu et al. 2025, MoBA, arXiv 2502.13189) or by the bound of Quest (Tang et al. 2024, arXiv
2406.10774). A query at position t, with group g of query heads that share a KV head, scores block b by

.. math:: s(t, b) = \sum_g q_{t,g} \cdot \bar k_b \quad\text{or}\quad
          s(t, b) = \sum_g \sum_j \max(q_{t,g,j} \max_b k_j,\; q_{t,g,j} \min_b k_j)

and reads the `top_k` best of the blocks that end before its own, its own block, the last `window` tokens and the
`sinks` first blocks, up to position t, in one softmax. Each query chooses by itself, so that none sees the
future.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.attention.grouped import causal, grouped, positions
from kvlab.attention.patterns import BlockSparse


class Blocks(NamedTuple):
    """What is known of blocks, (batch, kv_heads, blocks, head_dim) each: mean key, smallest and largest of each."""

    mean: Tensor
    low: Tensor
    high: Tensor


def blocks_of(k: Tensor, block: int) -> Blocks:
    """Of all whole blocks of keys (batch, kv_heads, keys, head_dim)."""
    whole = k[:, :, : k.shape[2] // block * block].unflatten(2, (-1, block))
    return Blocks(whole.mean(3), whole.amin(3), whole.amax(3)) if whole.shape[2] else Blocks(*[k[:, :, :0]] * 3)


@dataclass
class BlockIndex:
    """`Blocks` of a cache that grows: a token costs the work of one token.

    Parameters
    ----------
    block : int
        Tokens of a block.
    """

    block: int
    _open: Tensor | None = field(default=None, init=False)
    _known: list[Blocks] = field(default_factory=list, init=False)

    def append(self, k: Tensor) -> None:
        """Take up keys (batch, kv_heads, tokens, head_dim)."""
        held = k if self._open is None else torch.cat([self._open, k], dim=2)
        whole = held.shape[2] // self.block * self.block
        if whole:
            self._known.append(blocks_of(held[:, :, :whole], self.block))
        self._open = held[:, :, whole:]

    @property
    def blocks(self) -> Blocks:
        """Of all whole blocks so far; put together once for each that was finished."""
        if len(self._known) > 1:
            self._known = [Blocks(*(torch.cat(parts, dim=2) for parts in zip(*self._known, strict=True)))]
        return self._known[0] if self._known else Blocks(*[self._open[:, :, :0]] * 3)


def scores(q: Tensor, blocks: Blocks, score: str) -> Tensor:
    """Of each query for each block, summed over the group, (batch, kv_heads, queries, blocks)."""
    if score == "mean":
        return grouped(q, blocks.mean.shape[1]).sum(2) @ blocks.mean.transpose(2, 3)
    up, down = (part.transpose(2, 3)[:, :, None] for part in (blocks.high, blocks.low))
    q = grouped(q, blocks.mean.shape[1])  # the larger of two products is chosen by the sign of q
    return (q.clamp(min=0) @ up + q.clamp(max=0) @ down).sum(2)


class ChosenBlocks(NamedTuple):
    """Numbers of the chosen blocks (batch, kv_heads, queries, at most top_k), and which of them are chosen."""

    numbers: Tensor
    valid: Tensor


def choose(q: Tensor, k: Tensor, pattern: BlockSparse, blocks: Blocks | None = None) -> ChosenBlocks:
    """The blocks that each query reads by their score; `blocks` where they are known already."""
    known, at = blocks or blocks_of(k, pattern.block), positions(q, k)
    count = known.mean.shape[2]
    number = torch.arange(count, device=q.device)
    eligible = (number[None] < at[:, None] // pattern.block) & (number[None] >= pattern.sinks)
    found = scores(q, known, pattern.score).masked_fill(~eligible, float("-inf"))
    best = found.topk(min(pattern.top_k, count), dim=-1)
    return ChosenBlocks(best.indices, best.values > float("-inf"))


def local_from(at: Tensor, pattern: BlockSparse) -> Tensor:
    """First position of what each query reads next to itself: its window, and its own block."""
    return torch.minimum(at // pattern.block * pattern.block, (at - pattern.window + 1).clamp(min=0))


def allowed(q: Tensor, k: Tensor, pattern: BlockSparse, blocks: Blocks | None = None) -> Tensor:
    """What each query reads, bool (batch, kv_heads, queries, keys)."""
    at, place = positions(q, k), torch.arange(k.shape[2], device=q.device)
    local = (place[None] >= local_from(at, pattern)[:, None]) | (place < pattern.sinks * pattern.block)[None]
    chosen = choose(q, k, pattern, blocks)
    picked = torch.zeros(*chosen.numbers.shape[:3], k.shape[2] // pattern.block + 1, dtype=torch.bool, device=q.device)
    picked.scatter_(3, chosen.numbers, chosen.valid)
    return (picked[..., place // pattern.block] | local) & causal(at, k.shape[2])


def sparsity(read: Tensor) -> float:
    """Share of the causal pairs of query and key that are not read; 0 of dense causal attention."""
    queries, keys = read.shape[-2:]
    pairs = sum(range(keys - queries + 1, keys + 1)) * read[..., 0, 0].numel()
    return 1 - float(read.sum()) / pairs
