"""Hooks on the modules of attention layers; no forward is replaced.

Before the rotary embedding the tap sees Q and K after their norm, where a model has one (Qwen3), else
after the projection, and V after its projection: in every case the last tensor before the rotary embedding.
Each engine lays its projections out in its own way, so each has its own list of places; the rest is common.
After it, vLLM has a module that is called with K and V (`attention_inputs`); transformers has none, its
models hand K and V to their cache (`kvlab.engines.hf.engine.TapCache`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from kvlab.core.decoder import GEMMA
from kvlab.core.errors import CapabilityError
from kvlab.core.model import ModelInfo
from kvlab.engines.base import Tap


def attention_names(model: nn.Module, info: ModelInfo) -> list[str]:
    """Names of the `self_attn` modules in order of depth."""
    names = [name for name, _ in model.named_modules() if name.endswith(".self_attn")]
    if len(names) != info.n_layers:
        raise CapabilityError(f"found {len(names)} attention modules where the config promises {info.n_layers} layers")
    return names


def attention_layers(model: nn.Module, info: ModelInfo) -> list[nn.Module]:
    """The `self_attn` modules in order of depth."""
    return [model.get_submodule(name) for name in attention_names(model, info)]


def decoder_layers(model: nn.Module, info: ModelInfo) -> list[nn.Module]:
    """The layers in order of depth: what holds a `self_attn` module."""
    return [model.get_submodule(name.removesuffix(".self_attn")) for name in attention_names(model, info)]


def through(tap: Tap, layer: int, part: str, flat: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """Hand one projection to the tap as (heads, tokens, head_dim), and its answer back in its own layout.

    `flat` is (..., tokens, heads * head_dim) after a projection, (..., tokens, heads, head_dim) after a
    norm; both hold the same numbers in the same order.
    """
    answer = tap(layer, part, flat.reshape(-1, heads, head_dim).transpose(0, 1))
    if answer is None:
        return flat
    placed = flat.new_empty(flat.shape)  # a copy even of one head: vLLM turns K by its rotary embedding where it lies
    placed.view(-1, heads, head_dim).transpose(0, 1).copy_(answer)
    return placed


@contextmanager
def installed(places: list[tuple[nn.Module, Callable]], before: bool = False) -> Iterator[None]:
    """Forward hooks in place for the length of a `with` block, removed whatever happens in it.

    A hook gets what its module returns; with `before`, what the module is called with.
    """
    register = nn.Module.register_forward_pre_hook if before else nn.Module.register_forward_hook
    handles = [register(module, hook) for module, hook in places]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def norms_heads_first(info: ModelInfo) -> bool:
    """Whether the norms of Q and K of a transformers model have heads before tokens, which elsewhere come after."""
    return info.architecture == GEMMA


def separate_projections(model: nn.Module, info: ModelInfo, tap: Tap) -> list[tuple[nn.Module, Callable]]:
    """Places in a transformers model: q_proj, k_proj, v_proj, or q_norm and k_norm before RoPE."""
    turned = norms_heads_first(info)

    def hook(layer: int, part: str, heads: int) -> Callable:
        """What shows the tap one layer's Q, K or V as its module returns it."""
        if turned and part != "v":
            return lambda _module, _inputs, output: through(
                tap, layer, part, output.transpose(1, 2), heads, info.head_dim
            ).transpose(1, 2)
        return lambda _module, _inputs, output: through(tap, layer, part, output, heads, info.head_dim)

    places = []
    for layer, attention in enumerate(attention_layers(model, info)):
        q = getattr(attention, "q_norm", None) or attention.q_proj
        k = getattr(attention, "k_norm", None) or attention.k_proj
        places += [
            (q, hook(layer, "q", info.n_heads)),
            (k, hook(layer, "k", info.n_kv_heads)),
            (attention.v_proj, hook(layer, "v", info.n_kv_heads)),
        ]
    return places


def fused_projection(model: nn.Module, info: ModelInfo, tap: Tap) -> list[tuple[nn.Module, Callable]]:
    """Places in a vLLM model: the fused qkv_proj, and q_norm and k_norm where the model has them."""
    q_size, kv_size = info.n_heads * info.head_dim, info.n_kv_heads * info.head_dim

    def norm_hook(layer: int, part: str, heads: int) -> Callable:
        """What shows the tap one layer's Q or K as its norm returns it."""
        return lambda _module, _inputs, output: through(tap, layer, part, output, heads, info.head_dim)

    def fused_hook(layer: int, normed: bool) -> Callable:
        """What shows the tap the parts of one layer's fused projection: V alone where norms show it Q and K."""

        def hook(_module, _inputs, output):
            """Take the projection apart, and put it together again with the tap's answers."""
            fused, bias = output
            q, k, v = fused.split([q_size, kv_size, kv_size], dim=-1)
            if not normed:
                q = through(tap, layer, "q", q, info.n_heads, info.head_dim)
                k = through(tap, layer, "k", k, info.n_kv_heads, info.head_dim)
            v = through(tap, layer, "v", v, info.n_kv_heads, info.head_dim)
            return torch.cat([q, k, v], dim=-1), bias

        return hook

    places = []
    for layer, attention in enumerate(attention_layers(model, info)):
        normed = getattr(attention, "k_norm", None) is not None
        places.append((attention.qkv_proj, fused_hook(layer, normed)))
        if normed:
            places.append((attention.q_norm, norm_hook(layer, "q", info.n_heads)))
            places.append((attention.k_norm, norm_hook(layer, "k", info.n_kv_heads)))
    return places


def attention_inputs(model: nn.Module, info: ModelInfo, tap: Tap) -> list[tuple[nn.Module, Callable]]:
    """Places after the rotary embedding in a vLLM model: its `attn` modules, which are called with q, k and v.

    The hooks belong before the module.
    """

    def hook(layer: int) -> Callable:
        """What shows the tap K and V as one layer's attention is called with them."""

        def through_both(_module, inputs):
            q, k, v, *rest = inputs
            k = through(tap, layer, "k", k, info.n_kv_heads, info.head_dim)
            v = through(tap, layer, "v", v, info.n_kv_heads, info.head_dim)
            return q, k, v, *rest

        return through_both

    return [(attention.attn, hook(layer)) for layer, attention in enumerate(attention_layers(model, info))]
