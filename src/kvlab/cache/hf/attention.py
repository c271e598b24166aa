"""Attention of transformers' models that reads a coded cache block by block."""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlab.cache.hf.attention_view import Stored
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
        if plain and isinstance(key, Stored) and isinstance(value, Stored):
            out = attended(query, key, value, mask, more.get("scaling"))
            if out is not None:
                return out, None
        key, value = (x.whole() if isinstance(x, Stored) else x for x in (key, value))
        return before(module, query, key, value, mask, *args, **more)

    attention.kvlab = True
    AttentionInterface.register(NAME, attention)


def passes_here(model: nn.Module) -> bool:
    """Whether attention of this model was seen to come by, and still would."""
    return model.config._attn_implementation == NAME and any(type(module) in _SEEN for module in model.modules())


def fits(query: Tensor, key: Stored, mask: Tensor | None) -> bool:
    """Whether `attend` is the attention that was asked for."""
    shown = mask is None and query.shape[2] == 1  # without a mask one token sees everything
    return shown or (isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] == key.columns)


@torch.compiler.disable
def attended(query: Tensor, key: Stored, value: Stored, mask: Tensor | None, scale: float | None) -> Tensor | None:
    """What `attend` makes, where it is what was asked for; it gives no gradients."""
    learning = torch.is_grad_enabled() and query.requires_grad
    return None if learning or not fits(query, key, mask) else attend(query, key, value, mask, scale)


@apart
def attend(query: Tensor, key: Stored, value: Stored, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention over what is stored, [batch, tokens, heads, head_dim] in the query's dtype.

    Parameters
    ----------
    query : Tensor
        [batch, heads, tokens, head_dim]; neighbouring heads share one of K and V.
    key, value : Stored
        Of one layer in one call.
    mask : Tensor or None
        What is seen where bool, or what is added to scores, [batch or 1, heads or 1, tokens, columns].
    scale : float or None
        Of the scores; one over the square root of head_dim where not given.
    """
    batch, heads, tokens, head_dim = query.shape
    q = query.float() * (head_dim**-0.5 if scale is None else scale)
    scores = key.scores(q.reshape(batch, key.shape[1], -1, head_dim))
    if mask is not None:
        own = scores.view(batch, heads, tokens, -1)
        own.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else own.add_(mask)
    weights = scores.softmax(-1)
    if mask is not None:
        weights.nan_to_num_()  # a token of padding sees nothing
    out = value.mixed(weights).to(query.dtype)
    return out.view(batch, heads, tokens, head_dim).transpose(1, 2).contiguous()
