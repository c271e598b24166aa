"""Which loaded models may be paged, and their K and V saved as those of their files."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from kvlab.base.errors import CapabilityError
from kvlab.base.model import ModelInfo
from kvlab.cache.hf_cache import Shape, shape_of
from kvlab.cache.hf_rope import CHANGING
from kvlab.kvstore.paging.geometry import DTYPES, named
from kvlab.kvstore.snapshot.identity import rope_of

MASKABLE = ("eager", "sdpa")  # attention that is given a mask of its own for every query and column
OWN = ("torch.nn.", "transformers.")  # where the classes of a model's own layers are defined


def refuse_unfit(model: nn.Module, info: ModelInfo) -> None:
    """Refuse a model that would be paged wrongly, or whose K and V are not those of its files.

    Raises
    ------
    CapabilityError
        Another shape or class than `info` says, attention over a window or by a recurrent state, a rotary embedding
        that changes with the length, attention that takes no mask, dropout, quantised weights, layers of an adapter.
    """
    found, wanted = shape_of(model), Shape(info.n_layers, info.n_kv_heads, info.head_dim)
    if found != wanted or type(model).__name__ != info.architecture:
        raise CapabilityError(
            f"the loaded model is {type(model).__name__} with {found.layers} layers of {found.heads} KV heads of "
            f"{found.head_dim}, {info.path} is {info.architecture} with {wanted.layers} of {wanted.heads} of "
            f"{wanted.head_dim}; give the folder that it was loaded from"
        )
    attention, kind = model.config._attn_implementation, rope_of(model.config.to_dict())["rope_type"]
    if attention not in MASKABLE:
        raise CapabilityError(
            f"attention {attention!r} takes no mask of its own for every row, which a paged cache needs;"
            f" allowed: {', '.join(MASKABLE)}"
        )
    if kind in CHANGING:
        raise CapabilityError(
            f"rope type {kind!r} changes its frequencies with the length, so that a stored K is no longer what the"
            " model would compute; it cannot be paged"
        )
    if model.training:
        raise CapabilityError("the model is in training mode, where dropout may change what it computes; call eval()")
    if named(model.dtype) not in DTYPES:
        raise CapabilityError(f"the model computes in {named(model.dtype)}; allowed: {', '.join(DTYPES)}")
    if others := list(_other_weights(model)):
        raise CapabilityError(
            f"{others[0]}, so that what it computes is not what the files of {info.path} say; load the model as they"
            " are, and merge an adapter into files of its own"
        )


def _other_weights(model: nn.Module) -> Iterator[str]:
    """Signs that the model does not compute by the weights of its files, as they are."""
    if getattr(model.config, "quantization_config", None) is not None:
        yield "the model is quantised, as its configuration says"
    for name, module in model.named_modules():
        if not f"{type(module).__module__}.".startswith(OWN):
            yield f"layer {name or 'the whole'} is a {type(module).__qualname__} of another library"
    for name, weight in model.named_parameters():
        if not weight.is_floating_point():
            yield f"the weight {name} is {named(weight.dtype)}"
