"""Attention over coded pages: tokens are decoded a bounded number at a time, and none of them is kept.

Blocks of keys are attended to one after the other, and the results joined by their largest score and the sum of their
weights (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, FlashAttention, arXiv 2205.14135). Where a
sequence is cut depends on its own length alone, so an answer does not depend on who else is served in the step.

Each query reads a range of positions coded. What it reads exact (`pages.exact`) is attended to beside that, and
`Attended.add` makes one answer of both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.cache.pages.step import Mask, ServerStep, batches, blocks
from kvlab.codecs.klt.reading import Looked

SHARING = (2, 10)  # of torch; older ones may let no heads share one of K in their kernel, and say nothing

Read = Callable[[Tensor, Tensor], "Keys"]
"""Slots and positions, int64 [n], to what attention needs of these tokens."""

Quick = Callable[[Looked, Tensor], "Attended"]
"""Tokens and the queries that look at them, few of each sequence [n, heads, head_dim], to attention."""


@cache
def compiled() -> bool:
    """Whether there is what compiles loops over tokens for a CPU."""
    return importlib.util.find_spec("numba") is not None


class Attended(NamedTuple):
    """Attention of n queries over a part of their keys.

    Parameters
    ----------
    mean : Tensor
        Values weighed by the softmax over that part, float32 [n, heads, head_dim]; finite where the part is empty.
    log_sum : Tensor
        Logarithm of the sum of the exponentials of its scores, float32 [n, heads]; -inf where it is empty.
    """

    mean: Tensor
    log_sum: Tensor

    def add(self, queries: slice | Tensor, more: Attended) -> None:
        """Take in attention of some of the queries over a further part.

        The softmax over both is that over each, weighed by its share of the exponentials (FlashAttention, arXiv
        2205.14135).
        """
        mean, log_sum = self.mean[queries], self.log_sum[queries]
        share = torch.sigmoid(more.log_sum - log_sum).nan_to_num_()  # NaN where neither part has a key
        self.mean[queries] = mean.lerp_(more.mean, share[..., None])
        self.log_sum[queries] = torch.logaddexp(log_sum, more.log_sum)


class Keys(NamedTuple):
    """What attention needs of n tokens.

    Parameters
    ----------
    k, v : Tensor
        As attention sees them [kv_heads, n, head_dim].
    """

    k: Tensor
    v: Tensor


def attend(query: Tensor, read: Read, step: ServerStep, scale: float, quick: Quick | None = None) -> Attended:
    """Attention of a step's queries over the coded tokens that each of them reads.

    Parameters
    ----------
    query : Tensor
        [tokens, heads, head_dim]; keys and values are rounded to its dtype.
    read : Read
        Decodes tokens.
    step : ServerStep
        Which ones.
    scale : float
        Of the scores.
    quick : callable, optional
        Attends where a sequence has few queries; torch does where it is not given.
    """
    if quick and step.all_few:
        return quick(step.few[1], query)
    found = nothing(query)
    if quick and step.few:
        queries, looked = step.few
        found.mean[queries], found.log_sum[queries] = quick(looked, query[queries])
    for batch in batches(step, not quick):
        slots = torch.cat([step.slots[span.offset + span.first : span.offset + span.last] for span in batch])
        places = torch.cat([torch.arange(span.first, span.last) for span in batch])
        k, v = (part.to(query.dtype)[None] for part in read(slots, places))
        at = 0
        for span in batch:
            for queries in blocks(*step.starts[span.row : span.row + 2]):
                seen = min(int(step.until[queries.stop - 1]), span.last) - span.first  # by the last of these queries
                if seen > 0:
                    keys, mask = slice(at, at + seen), step.mask(queries, span.first, seen)
                    found.add(queries, of_block(query[queries], k[:, :, keys], v[:, :, keys], mask, scale))
            at += span.last - span.first
    return found


def nothing(query: Tensor) -> Attended:
    """Attention of queries [n, heads, head_dim] over no keys."""
    return Attended(
        torch.zeros(query.shape, dtype=torch.float32),
        torch.full(query.shape[:2], -torch.inf, dtype=torch.float32),
    )


def of_block(query: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float) -> Attended:
    """Attention of one sequence's queries [n, heads, head_dim] over k and v [1, kv_heads, keys, head_dim]."""
    mean, log_sum = softmax_over(query.transpose(0, 1)[None], k, v, mask, scale)
    return Attended(mean[0].transpose(0, 1), log_sum[0].T)


def softmax_over(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float) -> Attended:
    """Attention in float32, which also gives the sum of a softmax: by torch's kernel for a CPU, else by products.

    Parameters
    ----------
    q : Tensor
        [n, heads, queries, head_dim].
    k, v : Tensor
        [n, kv_heads, keys, head_dim], of the same dtype; neighbouring heads share one of K.
    mask : Mask or None
        Which keys queries see, [queries, keys] or [n, 1, queries, keys]; None where they see all.

    Returns
    -------
    Attended
        Of [n, heads, queries].
    """
    bias = None if mask is None else mask.bias.expand(len(q), 1, -1, -1)
    if q.device.type == "cpu":
        if torch.__version__ < SHARING:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        mean, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
        if mask is not None:
            log_sum.masked_fill_(mask.blind, -torch.inf)
        return Attended(mean.float(), log_sum)
    shared = q.shape[1] // k.shape[1], q.shape[2]  # heads that share one of K, and their queries
    scores = scale * q.float().unflatten(1, (k.shape[1], -1)).flatten(2, 3) @ k.float().mT
    if bias is not None:
        scores = (scores.unflatten(2, shared) + bias[:, :, None]).flatten(2, 3)
    log_sum = scores.logsumexp(-1)
    mean = (scores - log_sum[..., None]).exp_().nan_to_num_() @ v.float()
    return Attended(*(part.unflatten(2, shared).flatten(1, 2) for part in (mean, log_sum)))
