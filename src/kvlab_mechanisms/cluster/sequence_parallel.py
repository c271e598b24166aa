"""Attention over a text whose tokens are split between ranks (DeepSpeed-Ulysses, Jacobs et al. 2023, 2309.14509).

Before attention every rank gives each other one that one's heads of its tokens, so that a rank has all tokens of some
heads; after it the way goes back. What is sent is (n - 1) / n of Q, K, V and of what comes out, however many ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvlab.core.errors import UserError
from kvlab_mechanisms.cluster.ranks import Ranks
from kvlab_mechanisms.cluster.tensor_parallel import Share, attend, share


def attention(ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], causal: bool = True) -> Tensor:
    """Attention of this rank's tokens over all tokens.

    Parameters
    ----------
    q, k, v : Tensor
        [heads, own tokens, head_dim], [kv_heads, own tokens, head_dim] twice.
    lengths : sequence of int
        Tokens of each rank, in the order of the text; they need not be equal.

    Returns
    -------
    Tensor
        [heads, own tokens, head_dim].

    Raises
    ------
    UserError
        The heads cannot be split, or this rank's tokens are not as many as `lengths` says.
    """
    if q.shape[1] != lengths[ranks.rank]:
        raise UserError(f"rank {ranks.rank} has {q.shape[1]} tokens; lengths says {lengths[ranks.rank]}")
    shares = [share(len(q), len(k), ranks.world, rank) for rank in range(ranks.world)]
    q, k, v = (to_heads(ranks, x, lengths, shares, of) for x, of in ((q, "q"), (k, "kv"), (v, "kv")))
    return to_tokens(ranks, attend(q, k, v, causal), lengths)


def to_heads(
    ranks: Ranks, x: Tensor, lengths: Sequence[int], shares: Sequence[Share], of: Literal["q", "kv"]
) -> Tensor:
    """All heads of this rank's tokens to all tokens of this rank's heads, [own heads, tokens, head_dim].

    Where ranks share a KV head, it goes to each of them.
    """
    parts = [x[getattr(part, of)] for part in shares]
    heads, width = len(parts[ranks.rank]), x.shape[2]
    found = ranks.exchange(parts, [heads * length * width for length in lengths], "to_heads")
    return torch.cat([one.view(heads, -1, width) for one in found], 1)


def to_tokens(ranks: Ranks, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """All tokens of this rank's heads to all heads of this rank's tokens, [heads, own tokens, head_dim]."""
    heads, own, width = len(x), lengths[ranks.rank], x.shape[2]
    found = ranks.exchange(list(x.split(list(lengths), 1)), [heads * own * width] * ranks.world, "to_tokens")
    return torch.cat([one.view(heads, own, width) for one in found])
