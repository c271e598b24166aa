"""A plan of patterns as a transformers attention function, which counts what it read.

Registered by `transformers.AttentionInterface`, so that any model that asks that interface for its attention runs it:
Llama, Mistral, Qwen2 and Qwen3 do. One sequence, no padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvlab.attention.block_sparse import allowed
from kvlab.attention.chunk_summary import attend_summaries, reads, summaries_of
from kvlab.attention.grouped import attend, causal, positions
from kvlab.attention.layer_plan import LayerPlan
from kvlab.attention.patterns import BlockSparse, ChunkSummary, Pattern, SlidingWindow
from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.core.recipe import digest


@dataclass(frozen=True)
class VectorsRead:
    """Key and value vectors that queries read over all KV heads: by key [queries, keys], others [queries]."""

    by_key: Tensor
    instead: Tensor | int = 0

    @property
    def vectors(self) -> Tensor:
        """All of them, [queries]."""
        return self.by_key.sum(-1) + self.instead


@dataclass
class Effect:
    """What a plan did in the passes of an `attending` block.

    Parameters
    ----------
    vectors : dict of int to list of Tensor
        By layer and pass, vectors of head_dim numbers that each query read over all KV heads, with those that it
        looked at to choose; [queries] each.
    spared : int
        Vectors of K and V that queries left unread, of all layers and passes.
    context : int
        First tokens, of which it is also counted what was read as it is.
    early : dict of int to list of Tensor
        As `vectors`: K and V of the context alone, without what stands in their place or is looked at to choose.
    """

    vectors: dict[int, list[Tensor]] = field(default_factory=dict)
    spared: int = 0
    context: int = 0
    early: dict[int, list[Tensor]] = field(default_factory=dict)

    def note(self, layer: int, read: VectorsRead, looked: Tensor, dense: Tensor) -> None:
        """One layer of one pass: what was read, looked at to choose, and what there is to read."""
        self.vectors.setdefault(layer, []).append(read.vectors + looked)
        self.early.setdefault(layer, []).append(read.by_key[:, : self.context].sum(-1))
        self.spared += int((dense - read.vectors).sum())

    def refuse_idle(self, plan: LayerPlan, passes: int = 1) -> None:
        """`CodecNotActive` unless every layer ran its pattern in every pass, and less was read than there is."""
        ran = [len(self.vectors.get(layer, ())) for layer in range(len(plan))]
        if any(count != passes for count in ran):
            raise CodecNotActive(f"attention ran a plan's patterns {ran} times by layer; due: {passes} in each")
        if self.spared <= 0:
            raise CodecNotActive(
                f"{plan[-1].name} leaves out nothing of so few tokens; give a longer --context, or what reads less",
                code="not-active.nothing-left-out",
            )

    def read(self, last: int) -> float:
        """Vectors that one of the last so many queries of a pass read on average, summed over layers."""
        return _mean(self.vectors, last)

    def read_early(self, last: int) -> float:
        """The same of the context's own K and V alone."""
        return _mean(self.early, last)


def _mean(found: dict[int, list[Tensor]], last: int) -> float:
    """Of the last so many queries of every pass, summed over layers."""
    return sum(torch.cat([x[-last:] for x in passes]).double().mean().item() for passes in found.values())


@dataclass
class Planned:
    """The attention function of a plan; `effect` counts while it is there."""

    plan: LayerPlan
    effect: Effect | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **_named,
    ) -> tuple[Tensor, None]:
        """As transformers calls it: query (1, heads, queries, head_dim) -> (1, queries, heads, head_dim)."""
        at = positions(query, key)
        if dropout or (attention_mask is not None and not _is_causal(attention_mask, at, key.shape[2])):
            raise CapabilityError("a plan of patterns reads one sequence, without padding and without dropout")
        pattern = self.plan[module.layer_idx]
        out, read = run(pattern, query, key, value, scaling)
        if self.effect is not None:
            looked = torch.tensor([pattern.scored(t) for t in at.tolist()], device=at.device) * key.shape[1]
            self.effect.note(module.layer_idx, read, looked, 2 * key.shape[1] * (at + 1))
        return out.transpose(1, 2).contiguous(), None


def _is_causal(mask: Tensor, at: Tensor, keys: int) -> bool:
    """Whether a mask (batch, 1, queries, keys) hides the future and nothing else."""
    return mask.dtype == torch.bool and bool((mask[..., :keys] == causal(at, keys)).all())


def run(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, VectorsRead]:
    """Attention by a pattern, and what it read."""
    at, heads = positions(q, k), k.shape[1]
    if isinstance(pattern, ChunkSummary):
        known = summaries_of(k, v, pattern.chunk)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        found = reads(q, k, pattern, known, scale)
        read = VectorsRead(2 * heads * found.keys, 2 * found.chunks.sum((0, 1, 3)))
        return attend_summaries(q, k, v, pattern, scale, known), read
    if isinstance(pattern, BlockSparse):
        seen = allowed(q, k, pattern)
        return attend(q, k, v, seen, scale), VectorsRead(2 * seen.sum((0, 1)))
    seen = causal(at, k.shape[2])
    if isinstance(pattern, SlidingWindow):
        seen &= torch.arange(k.shape[2], device=q.device)[None] > at[:, None] - pattern.window
    return attend(q, k, v, seen, scale), VectorsRead(2 * heads * seen)


def registered(plan: LayerPlan) -> tuple[str, Planned]:
    """The name by which transformers knows a plan from now on, for `attn_implementation`, and its function."""
    name = f"kvlab_{digest({'plan': [pattern.name for pattern in plan]})}"
    function = Planned(plan)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name, function


def plan_of(model: PreTrainedModel) -> LayerPlan | None:
    """What a model reads by as it runs now; None where that is no plan of patterns."""
    function = AttentionInterface().get(model.config._attn_implementation)
    return function.plan if isinstance(function, Planned) else None


@contextmanager
def attending(model: PreTrainedModel, plan: LayerPlan) -> Iterator[Effect]:
    """A model reads by a plan for the length of a `with` block.

    Raises
    ------
    CapabilityError
        The plan is of another number of layers.
    """
    layers, before = model.config.num_hidden_layers, model.config._attn_implementation
    if len(plan) != layers:
        raise CapabilityError(f"a plan of {len(plan)} layers for a model of {layers}")
    name, function = registered(plan)
    function.effect = Effect()
    model.set_attn_implementation(name)
    try:
        yield function.effect
    finally:
        function.effect = None
        model.set_attn_implementation(before)
