"""A coder that lets tokens of a context leave the cache; the others keep their positions, and gaps are closed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.attention.named import PLACE, Eviction, numbered
from kvlab.base.errors import UserError
from kvlab.base.recipe import Cell
from kvlab.engines.base import ContextCache, Left
from kvlab.kvstore.memory.compaction import compact
from kvlab.kvstore.memory.selection import latest, pooled_attention, select, small_keys
from kvlab.lab.coding import QUERIES, STREAMS, CleanCapture, now
from kvlab.lab.keeping import KeepingCoder

Turn = Callable[[Tensor], Tensor]
"""The rotary embedding of K [1, heads, tokens, head_dim] at positions 0 and on."""


class EvictingCoder(KeepingCoder):
    """Chooses what stays by an eviction's policy, layer by layer.

    Parameters
    ----------
    rotation : callable
        Gives the model's rotary embedding of so many tokens.
    """

    def __init__(self, cell: Cell, asked: Eviction, rotation: Callable[[int], Turn], dtype: torch.dtype | None):
        super().__init__(cell, dtype)
        if asked.recent > QUERIES:
            raise UserError(f"{asked.name}: recent is {asked.recent}; allowed: at most {QUERIES}")
        self.asked, self.rotation = asked, rotation

    def held(self, clean: CleanCapture, ids: list[int], window: int) -> ContextCache:
        """See `Coder`: the tokens that stay."""
        sample = clean.kept[0, "k"]
        began = now(sample)
        self.made = {place: self.stored(x) for place, x in clean.kept.items()}
        places = self.places(clean)
        left = Left(sample.shape[1], places)
        for layer, where in enumerate(places):
            one = compact(self.made[layer, "k"], self.made[layer, "v"], where)
            left[layer, "k"], left[layer, "v"] = one.k, one.v
            self.tally.fires += len(STREAMS)
            self.tally.coded_bytes += one.k.nbytes + one.v.nbytes + numbered(self.asked.policy) * PLACE * len(where)
        self.tally.encode_seconds += now(sample) - began
        return left

    def places(self, clean: CleanCapture) -> list[Tensor]:
        """Positions of the tokens that stay, by layer, rising."""
        context, asked = self.made[0, "k"].shape[1], self.asked
        layers, kept = range(len(self.made) // len(STREAMS)), asked.budget(context)
        if asked.policy == "sinks":
            return [latest(context, kept, asked.sinks)] * len(layers)
        if asked.policy == "small_keys":
            scores = [small_keys(self.made[layer, "k"]) for layer in layers]
        else:
            turn, last = self.rotation(context), asked.recent
            scores = [last_attention(turn, clean.queries[n], self.made[n, "k"], last) for n in layers]
        return [select(one.cpu(), kept, asked.sinks, asked.recent) for one in scores]


def last_attention(turn: Turn, q: Tensor, k: Tensor, last: int) -> Tensor:
    """What the last queries of a context give its tokens, pooled [tokens].

    Parameters
    ----------
    turn : callable
        The rotary embedding of the context.
    q : Tensor
        [heads, queries, head_dim], of the last tokens, as many as there are; before the rotary embedding, as k is.
    k : Tensor
        [kv_heads, tokens, head_dim].
    last : int
        How many of them look.
    """
    tokens, q = k.shape[1], q[:, -last:].float()
    placed = q.new_zeros(len(q), tokens, q.shape[-1])
    placed[:, tokens - q.shape[1] :] = q
    turned_q, turned_k = turn(placed[None])[0, :, tokens - q.shape[1] :], turn(k.float()[None])[0]
    logits = turned_q @ turned_k.repeat_interleave(len(q) // len(k), dim=0).mT / q.shape[-1] ** 0.5
    hidden = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).triu(tokens - q.shape[1] + 1)
    return pooled_attention(logits.masked_fill(hidden, -torch.inf).softmax(-1))
