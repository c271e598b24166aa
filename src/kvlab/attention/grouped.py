"""Attention whose query heads share KV heads, and the causal mask of queries that come last."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvlab.core.errors import LayoutMismatch


def offset_of(q: Tensor, k: Tensor) -> int:
    """Position of the first query: queries are the last of the tokens whose keys are given.

    Parameters
    ----------
    q : Tensor, shape (batch, heads, queries, head_dim)
    k : Tensor, shape (batch, kv_heads, keys, head_dim)

    Raises
    ------
    LayoutMismatch
        There are more queries than keys, or heads do not divide.
    """
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise LayoutMismatch(f"queries {tuple(q.shape)} and keys {tuple(k.shape)} are not of one layout")
    if q.shape[1] % k.shape[1]:
        raise LayoutMismatch(f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads evenly", code="layout.heads")
    if q.shape[2] > k.shape[2]:
        raise LayoutMismatch(
            f"{q.shape[2]} queries are more than the {k.shape[2]} keys that they end", code="layout.queries"
        )
    return k.shape[2] - q.shape[2]


def positions(q: Tensor, k: Tensor) -> Tensor:
    """Positions of the queries, int64 [queries]."""
    return torch.arange(offset_of(q, k), k.shape[2], device=q.device)


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, queries, head_dim) as (batch, kv_heads, group, queries, head_dim)."""
    return q.unflatten(1, (kv_heads, q.shape[1] // kv_heads))


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, scale: float | None = None) -> Tensor:
    r"""Softmax attention, :math:`\mathrm{softmax}(q k^T \cdot scale)\, v` (Vaswani et al. 2017, arXiv 1706.03762).

    Parameters
    ----------
    allowed : Tensor of bool, shape (queries, keys) or (batch, kv_heads, queries, keys), optional
        What each query reads; causal where it is left out.
    scale : float, optional
        Default: head_dim to the power of -1/2.

    Returns
    -------
    Tensor, shape (batch, heads, queries, head_dim)
    """
    if allowed is None:
        allowed = causal(positions(q, k), k.shape[2])
    if allowed.dim() == 4:
        allowed = allowed.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)


def causal(at: Tensor, keys: int) -> Tensor:
    """Which of so many keys are no later than each query, bool [queries, keys]."""
    return torch.arange(keys, device=at.device)[None] <= at[:, None]
