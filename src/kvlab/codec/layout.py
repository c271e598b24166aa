"""Which vectors share a block."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["per_head", "mixed_heads"]


def split(rows: Tensor, layout: Layout, block_size: int) -> list[Tensor]:
    """Cut [heads, tokens, dim] into blocks.

    ``per_head`` cuts each head's tokens by themselves; ``mixed_heads`` cuts one sequence of rows
    ordered token * heads + head, so that one block holds all heads of its tokens.

    Returns
    -------
    list of Tensor
        The full blocks [blocks, block_size, dim] if there are any, then the ragged last blocks
        [blocks, remainder, dim] if there are any.
    """
    series = rows if layout == "per_head" else rows.transpose(0, 1).reshape(1, -1, rows.shape[-1])
    count, length, dim = series.shape
    whole = length - length % block_size
    batches = []
    if whole:
        batches.append(series[:, :whole].reshape(count * (whole // block_size), block_size, dim))
    if whole < length:
        batches.append(series[:, whole:])
    return batches


def join(batches: list[Tensor], layout: Layout, heads: int) -> Tensor:
    """Put the blocks of `split` back together as [heads, tokens, dim]."""
    count = heads if layout == "per_head" else 1
    dim = batches[0].shape[-1]
    series = torch.cat([batch.reshape(count, -1, dim) for batch in batches], dim=1)
    return series if layout == "per_head" else series.reshape(-1, heads, dim).transpose(0, 1).contiguous()
