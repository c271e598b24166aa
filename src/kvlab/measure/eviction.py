"""A coder that lets tokens of a context leave the cache; the others keep their positions, and gaps are closed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.attention.compaction import compact
from kvlab.attention.named import PLACE, Eviction, numbered
from kvlab.attention.selection import latest, pooled_attention, select, small_keys
from kvlab.core.errors import UserError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Cell
from kvlab.core.records import Coding
from kvlab.engines.base import ContextCache, Left
from kvlab.measure.coding import QUERIES, STREAMS, CleanCapture, Coder, now

# Coders of what is no codec: they keep less of a context's K and V, in numbers of an engine's own kind.


class KeepingCoder(Coder):
    """Keeps less, and counts every byte of it in its tally.

    Parameters
    ----------
    cell : Cell
        Of all layers and both streams, under `snapshot`; its recipe codes nothing.
    dtype : torch.dtype or None
        That numbers are kept in; None leaves them as they are.

    Attributes
    ----------
    made : dict of (layer, stream) to Tensor
        K and V of the last window's tokens, those that are left out too, as what is kept was made from.
    """

    def __init__(self, cell: Cell, dtype: torch.dtype | None):
        super().__init__(cell, None)
        self.dtype = dtype
        self.made: dict[tuple[int, str], torch.Tensor] = {}

    def warm_up(self, clean: CleanCapture, ids: list[int], window: int) -> None:
        """See `Coder`."""
        self.held(clean, ids, window)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """As it is kept."""
        return x if self.dtype is None else x.to(self.dtype)

    def coding(self, info: ModelInfo, tokens: int, dtype: str) -> Coding:
        """See `Coder`; the bytes are those of the tally, which are all that is kept."""
        self.refuse_idle()
        return Coding(
            fires=self.tally.fires,
            expected_fires=self.expected_fires(),
            values=self.cell.windows * tokens * info.values_per_token,
            coded_bytes=self.tally.coded_bytes,
            raw_bytes=0,
            d_eff={},
            outlier_rate={},
            whitened_error={},
        )


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
        scores = [SCORES[asked.policy](self, clean, layer) for layer in layers]
        return [select(one.cpu(), kept, asked.sinks, asked.recent) for one in scores]


def by_keys(coder: EvictingCoder, _clean: CleanCapture, layer: int) -> Tensor:
    """Scores of ``small_keys`` [tokens]."""
    return small_keys(coder.made[layer, "k"])


def by_attention(coder: EvictingCoder, clean: CleanCapture, layer: int) -> Tensor:
    """Scores of ``attention`` [tokens]."""
    k = coder.made[layer, "k"]
    return last_attention(coder.rotation(k.shape[1]), clean.queries[layer], k, coder.asked.recent)


SCORES: dict[str, Callable[[EvictingCoder, CleanCapture, int], Tensor]] = {
    "small_keys": by_keys,
    "attention": by_attention,
}
"""How an eviction scores a layer's tokens, the highest of which stay; ``sinks`` needs no score."""


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
