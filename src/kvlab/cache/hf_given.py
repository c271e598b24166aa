"""What a cache is given by a model's forward, held against what it was made for and what it holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.base.errors import CapabilityError
from kvlab.cache.hf_layer import CodecLayer
from kvlab.cache.row import Row
from kvlab.cache.tables import Shape


def refuse_other_shape(k: Tensor, v: Tensor, layer: int, shape: Shape) -> None:
    """`CapabilityError` unless K and V are of a layer that the cache has, and of its shape."""
    want = (shape.heads, shape.head_dim)
    if layer >= shape.layers or any((x.shape[1], x.shape[3]) != want for x in (k, v)):
        raise CapabilityError(
            f"layer {layer} has K of shape {list(k.shape)} and V of shape {list(v.shape)}; this cache is for "
            f"{shape.layers} layers of {want[0]} KV heads of {want[1]} dimensions, as its model had when it was made; "
            "make one for the model that runs, with all its heads in this process"
        )


def refuse_other_kind(k: Tensor, held: CodecLayer, on_cpu: bool) -> None:
    """`CapabilityError` unless K is as many rows as a layer holds, of its dtype, and where the cache can code it."""
    if k.is_meta:
        raise CapabilityError("the model is on the meta device, where it has no numbers; load its weights first")
    if on_cpu and k.device.type != "cpu":
        raise CapabilityError(
            f"K is on {k.device}, and this cache was made while its model was on the CPU; make one after it was moved"
        )
    if held.batch_size and held.batch_size != k.shape[0]:
        raise CapabilityError(
            f"the cache holds {held.batch_size} rows, the call has {k.shape[0]}; call reset() for a new batch"
        )
    if held.is_initialized and (held.dtype, held.device) != (k.dtype, k.device):
        raise CapabilityError(
            f"the cache holds K in {held.dtype} on {held.device}, and this call has {k.dtype} on {k.device}: the model "
            "was moved, or autocast begun or ended, in the middle of a text; call reset() and give the text again"
        )


def positions(found: Tensor | None, batch: int, tokens: int) -> Tensor:
    """The positions that a forward gave its rotary module, int32 [batch, tokens]; `CapabilityError` for others."""
    if found is None:
        raise CapabilityError(
            "the forward did not ask the model's rotary module (rotary_emb), so that K cannot be turned back; "
            'use placement="post_rope", which codes K as the cache is handed it'
        )
    if found.dim() != 2 or found.shape[0] not in (1, batch) or found.shape[1] != tokens:
        raise CapabilityError(
            f"this forward gives positions of shape {list(found.shape)} to {batch} rows of {tokens} tokens; K is turned"
            f' back by one position for each token, shape [{batch}, {tokens}]; use placement="post_rope"'
        )
    return found.to(torch.int32).expand(batch, tokens)


def refuse_other_frequencies(before: Sequence[Tensor], now: Sequence[Tensor]) -> None:
    """`CapabilityError` when a rotary module's buffers are not those that turned the tokens in the cache."""
    # what is the same tensor need not be compared, for which an accelerator would be waited for
    others = [(a, b) for a, b in zip(before, now, strict=True) if a is not b]
    if not all(a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in others):
        raise CapabilityError(
            "the model's rotary frequencies are others than those that turned the tokens in the cache, as after "
            "model.to() to another dtype and back; call reset() and give the text again"
        )


def shown(mask: object) -> Tensor:
    """The mask itself; `CapabilityError` unless padding can be read from it."""
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask
    given = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"as {type(mask).__name__}"
    raise CapabilityError(
        f"the attention mask came {given}, padding can only be read from one [rows, tokens]; give that, or none"
    )


def new_pads(mask: Tensor, rows: Sequence[Row], tokens: int) -> list[int]:
    """Padding on the left that each row's next `tokens` tokens begin with, from the mask [batch, all tokens]."""
    lead = (mask.long().cumsum(dim=1) == 0).sum(dim=1).tolist()
    return [0 if row.held else max(0, min(tokens, before - row.pads)) for row, before in zip(rows, lead, strict=True)]
