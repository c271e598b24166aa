"""Attention by a pattern, written out query by query in numpy's float64: nothing of `attention` but the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from kvlab.attention.patterns import BlockSparse, ChunkSummary, Pattern, SlidingWindow

Floats = NDArray[np.float64]


Attend = Callable[[int, Tensor, Tensor, Tensor, float, int], Tensor]
"""What `PlainModel.forward` calls as its attention: layer, q, k, v, scale, and the first query's position."""


def reader(plan: Sequence[Pattern]) -> Attend:
    """Reading by a pattern for each layer."""

    def one(layer: int, q: Floats, k: Floats, v: Floats, scale: float) -> Floats:
        """One query by the layer's pattern."""
        return _one(plan[layer], q, k, v, scale)

    return _by_query(one)


def reader_of_kept(places: Sequence[Sequence[int]], context: int) -> Attend:
    """Reading what an eviction left: by layer, places of a context of so many tokens, and all tokens after it."""

    def one(layer: int, q: Floats, k: Floats, v: Floats, scale: float) -> Floats:
        """One query over what is left before it."""
        left = [*places[layer], *range(context, len(k))]
        return _softmax(q @ k[left].T * scale) @ v[left]

    return _by_query(one)


def _by_query(one: Callable[[int, Floats, Floats, Floats, float], Floats]) -> Attend:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, begin: int) -> Tensor:
        """Of q (heads, queries, head_dim) at positions from `begin` on; [queries, heads * head_dim]."""
        queries, keys, values = (x.cpu().double().numpy() for x in (q, k, v))
        group = len(queries) // len(keys)
        out = np.empty_like(queries)
        for head, (k_head, v_head) in enumerate(zip(keys, values, strict=True)):
            rows = slice(head * group, (head + 1) * group)
            for row in range(queries.shape[1]):
                until = begin + row + 1
                out[rows, row] = one(layer, queries[rows, row], k_head[:until], v_head[:until], scale)
        return torch.from_numpy(out).to(q).transpose(0, 1).reshape(q.shape[1], -1)

    return attend


def _softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _one(pattern: Pattern, q: Floats, k: Floats, v: Floats, scale: float) -> Floats:
    """One query's heads q [group, head_dim] over the past and itself, k and v [tokens, head_dim]."""
    t, bonus = len(k) - 1, np.zeros(0)
    kept = range(t + 1)
    far_k, far_v = k[:0], v[:0]
    if isinstance(pattern, SlidingWindow):
        kept = [i for i in kept if t - i < pattern.window]
    elif isinstance(pattern, BlockSparse):
        own, known = t // pattern.block, {}
        for b in range(pattern.sinks, own):
            block = k[b * pattern.block : (b + 1) * pattern.block]
            known[b] = _bound(q, block) if pattern.score == "bounds" else (q @ block.mean(0)).sum()
        best = set(sorted(known, key=known.get, reverse=True)[: pattern.top_k]) | {own, *range(pattern.sinks)}
        kept = [i for i in kept if i // pattern.block in best or t - i < pattern.window]
    elif isinstance(pattern, ChunkSummary):
        own, size = t // pattern.chunk, pattern.chunk
        near = {c for c in range(own + 1) if own - c <= pattern.exact or c < pattern.sinks}
        means = {c: k[c * size : (c + 1) * size].mean(0) for c in range(own) if c not in near}
        chosen = sorted(means, key=lambda c: (q @ means[c]).sum(), reverse=True)[: pattern.top_k]
        kept = [i for i in kept if i // size in near]
        if chosen:
            far_k = np.stack([means[c] for c in chosen])
            far_v = np.stack([v[c * size : (c + 1) * size].mean(0) for c in chosen])
            bonus = np.full(len(chosen), np.log(size))
    kept = list(kept)
    logits = q @ np.concatenate([k[kept], far_k]).T * scale
    logits[:, len(kept) :] += bonus
    return _softmax(logits) @ np.concatenate([v[kept], far_v])


def _bound(q: Floats, block: Floats) -> float:
    """The most that a key within a block's bounds can score, summed over heads."""
    return float(np.maximum(q * block.max(0), q * block.min(0)).sum())


# The scored tokens, read by position from the file of windows.


def window(path: Path, text: str, number: int) -> list[int]:
    """The token ids of one window of a text, as the file has them."""
    with safe_open(str(path), framework="numpy") as file:
        return [int(token) for token in file.get_slice(text)[number]]


def labels(ids: list[int], positions: list[int]) -> np.ndarray:
    """The tokens that stand at some positions."""
    return np.array([ids[place] for place in positions])
