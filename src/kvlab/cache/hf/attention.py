"""Attention of transformers' models that reads a coded cache block by block."""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlab.cache.hf.attention_view import Unopened
from kvlab.codecs.shared.apart import apart

NAME = "sdpa"
FEW = 32  # tokens of a call, up to which it reads block by block; a longer one decodes a layer at a time
_SEEN: set[type] = set()


def register_attention() -> None:
    """Stand in front of the function that is registered, unless that is so already."""
    before = ALL_ATTENTION_FUNCTIONS[NAME]
    if getattr(before, "kvlab", False):
        return

    @wraps(before)  # its name too: whoever asks which attention ran is told whose it is
    def attention(module: nn.Module, query: Tensor, key, value, mask: Tensor | None, *args, **more):
        if not torch.compiler.is_compiling():
            _SEEN.add(type(module))
        plain = not args and not more.get("dropout") and more.get("position_bias") is None
        if plain and isinstance(key, Unopened) and isinstance(value, Unopened):
            out = attended(query, key, value, mask, more.get("scaling"))
            if out is not None:
                return out, None
        key, value = (x.whole() if isinstance(x, Unopened) else x for x in (key, value))
        return before(module, query, key, value, mask, *args, **more)

    attention.kvlab = True
    AttentionInterface.register(NAME, attention)


def passes_here(model: nn.Module) -> bool:
    """Whether attention of this model was seen to come by, and still would."""
    return model.config._attn_implementation == NAME and any(type(module) in _SEEN for module in model.modules())


@torch.compiler.disable
def attended(query: Tensor, key: Unopened, value: Unopened, mask: Tensor | None, scale: float | None) -> Tensor | None:
    """Attention over what is stored, where it is what was asked for: see `Unopened.attend`. It gives no gradients.

    The scale is one over the square root of head_dim where it is not given.
    """
    if torch.is_grad_enabled() and query.requires_grad:
        return None
    return attend(query, key, value, mask, query.shape[-1] ** -0.5 if scale is None else scale)


@apart
def attend(query: Tensor, key: Unopened, value: Unopened, mask: Tensor | None, scale: float) -> Tensor | None:
    """The same without a look at gradients."""
    return key.attend(query, value, mask, scale)
