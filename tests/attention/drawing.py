"""Random queries, keys and values for tests of attention."""

from __future__ import annotations

import torch


def draw(seed: int = 0, tokens: int = 50, queries: int | None = None, heads: int = 4, kv_heads: int = 2, d: int = 16):
    """q (1, heads, queries, d), k and v (1, kv_heads, tokens, d)."""
    chance = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, tokens, d, generator=chance) for n in (heads, kv_heads, kv_heads))
    return q[:, :, tokens - (queries or tokens) :], k, v


def after(t: int, *tensors: torch.Tensor, seed: int = 99) -> tuple[torch.Tensor, ...]:
    """The same, with everything after position t drawn anew and large."""
    chance = torch.Generator().manual_seed(seed)
    changed = [x.clone() for x in tensors]
    for x in changed:
        x[:, :, t + 1 :] = 30 * torch.randn(x[:, :, t + 1 :].shape, generator=chance)
    return tuple(changed)


def rotate(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """RoPE in halves, base 10000."""
    half = x.shape[-1] // 2
    angle = at[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
