"""Queries and keys of whole windows as attention multiplies them: projected, turned by position, scaled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache.hf_rope import find_rotary, turns
from kvlab.engines.hf import HFEngine
from kvlab.engines.hooks import attention_layers


@dataclass(frozen=True)
class Layer:
    """One layer over one window.

    Attributes
    ----------
    q : Tensor
        float32 [q_heads, tokens, head_dim], after the rotary embedding.
    k : Tensor
        float32 [kv_heads, tokens, head_dim], after it too. Query head h reads KV head ``h // (q_heads / kv_heads)``.
    scaling : float
        What attention multiplies q . k by.
    """

    q: Tensor
    k: Tensor
    scaling: float

    def own(self, keys: Tensor) -> Tensor:
        """Keys [..., kv_heads, tokens, head_dim] as each query head reads them [..., q_heads, tokens, head_dim]."""
        return keys.repeat_interleave(self.q.shape[0] // self.k.shape[0], dim=-3)

    def weights(self, position: int) -> Tensor:
        """Attention of every head at a position over the tokens up to it, float64 [q_heads, position + 1]."""
        return self.logits(position).softmax(-1)

    def logits(self, position: int) -> Tensor:
        """What the softmax is taken of, float64 [q_heads, position + 1]."""
        keys = self.own(self.k[:, : position + 1]).double()
        return self.scaling * (keys @ self.q[:, position, :, None].double())[..., 0]


def layers(engine: HFEngine, ids: Sequence[int]) -> Iterator[Layer]:
    """The layers of one window in order of depth.

    Parameters
    ----------
    engine : HFEngine
    ids : sequence of int
        Token ids; attention is causal.

    Raises
    ------
    CapabilityError
        When the model's rotary embedding is not one that can be repeated.
    """
    seen: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, part: str, x: Tensor) -> None:
        if part in "qk":
            seen[layer, part] = x.detach().float().cpu().clone()

    engine.score(ids, len(ids) - 2, keep)
    model = engine.model
    rotary = find_rotary(model, engine.info.head_dim)
    places = torch.arange(len(ids), device=model.device)[None]
    (turn,) = turns(rotary, places, torch.empty(0, dtype=torch.float32, device=model.device))
    for number, module in enumerate(attention_layers(model, engine.info)):
        q, k = (turn.redo(seen[number, part].to(model.device), 0).cpu() for part in "qk")
        yield Layer(q, k, module.scaling)
