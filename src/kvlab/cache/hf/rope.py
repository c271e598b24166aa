"""The rotary embedding of a transformers model: what it turned, turned back, and by which positions.

The cache is handed K after the rotary embedding, a calibration knows K before it. Both are one
rotation apart that is known exactly, once the positions of the running forward are; they are read off
the model's own rotary module by a hook, which holds for left padding and for any `position_ids`.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvlab.cache.rope_turn import REMEDY, TOLERANCE, RopeTurn, apply_rope, refuse_lossy
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import CapabilityError
from kvlab.engines.hf.rotary import Rotary

PROBED_POSITIONS = (0, 1, 7, 100)
# Their frequencies change with the length seen so far, so that a position says too little.
CHANGING = ("dynamic", "longrope")


def turns(rotary: Rotary, layer: int, positions: Tensor, like: Tensor) -> list[RopeTurn]:
    """Rotation of each row of `positions` [rows, tokens] in a layer, with the model's own cos and sin.

    They are of `like`'s dtype. Rows of the same positions have one in common.
    """
    if len(positions) > 1 and (positions == positions[0]).all():
        return turns(rotary, layer, positions[:1], like) * len(positions)
    cos, sin = rotary(layer, positions.long(), like)
    return [RopeTurn(*pair) for pair in zip(cos.float(), sin.float(), strict=True)]


def turns_by_layer(rotary: Rotary, positions: Tensor, like: Tensor) -> list[list[RopeTurn]]:
    """`turns` of every layer; layers alike have them in common."""
    made = {rotary.kinds[layer]: turns(rotary, layer, positions, like) for layer in rotary.distinct()}
    return [made[kind] for kind in rotary.kinds]


def turns_of(config: PreTrainedConfig, head_dim: int, tokens: int, dtype: torch.dtype) -> list[RopeTurn]:
    """The rotary embedding of positions 0 to `tokens`, by layer, of a model of this configuration.

    None of its weights is read.

    Parameters
    ----------
    dtype : torch.dtype
        Of K, in which cos and sin are made.

    Raises
    ------
    CapabilityError
        See `find_rotary`.
    """
    rotary = Rotary.of_config(config)
    refuse_unturnable(rotary, head_dim)
    found = turns_by_layer(rotary, torch.arange(tokens)[None], torch.empty(0, dtype=dtype))
    return [rows[0] for rows in found]


def find_rotary(model: nn.Module, head_dim: int) -> Rotary:
    """The model's rotary embedding, after its convention has been found to be the one of `apply_rope`.

    Raises
    ------
    CapabilityError
        There is no rotary module or more than one, or in a layer it turns a part of the head only, in another
        convention, or by frequencies that change while the cache grows, or has no numbers yet.
    """
    rotary = Rotary.of(model)
    refuse_unturnable(rotary, head_dim)
    return rotary


@apart
def refuse_unturnable(rotary: Rotary, head_dim: int) -> None:
    """See `find_rotary`."""
    for layer in rotary.distinct():
        _refuse_unturnable(rotary, layer, head_dim)


def _refuse_unturnable(rotary: Rotary, layer: int, head_dim: int) -> None:
    """The same of one layer, which stands for all of its kind."""
    kind, name = rotary.rope_type(layer), type(rotary.module).__name__
    if kind in CHANGING:
        raise CapabilityError(
            f"rope type {kind!r} changes its frequencies while the cache grows; {REMEDY}", code="capability.moving-rope"
        )
    x = torch.randn(1, 1, len(PROBED_POSITIONS), head_dim, generator=generator("rotary probe"), dtype=torch.float32)
    x = x.to(next(rotary.module.buffers(), x).device)
    if x.is_meta:
        raise CapabilityError(
            "the model is on the meta device, where it has no numbers; load its weights first",
            code="capability.meta-device",
        )
    try:
        cos, sin = rotary(layer, torch.tensor([PROBED_POSITIONS], device=x.device), x)
        if cos.shape[-1] != head_dim:
            raise CapabilityError(
                f"{name} turns {cos.shape[-1]} of {head_dim} dimensions; {REMEDY}", code="capability.partial-rope"
            )
        theirs = rotary.apply(x, cos, sin)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CapabilityError(
            f"{name} cannot be asked for its rotation ({type(error).__name__}: {error}); {REMEDY}",
            code="capability.unknown-rope",
        ) from None
    ours = apply_rope(x[0], cos[0], sin[0])
    if not torch.allclose(ours, theirs[0].float(), atol=TOLERANCE):
        raise CapabilityError(
            f"{name} turns K in another convention than by halves; {REMEDY}", code="capability.rope-convention"
        )
    refuse_lossy(RopeTurn(cos[0], sin[0]), ours)


@dataclass
class ForwardSeen:
    """What the hooks saw of the running forward: its attention mask, of whatever kind, and its positions.

    `held` are the tokens that the cache had when it began.
    """

    mask: object
    held: int
    positions: Tensor | None = None


class Watch:
    """Hooks that note what `owner` needs of each forward that is run with it as its cache.

    A forward runs in one thread from its first module to its last, so what is seen of it is that thread's alone: others
    may run the same model with other caches at the same time. Which cache it runs with is seen by the cache itself
    among what the model is given, whatever the argument's name is (`past_key_values` before transformers 5.24, `cache`
    since then). The hooks hold no strong reference to the owner and go when it does.

    Parameters
    ----------
    model : nn.Module
        A transformers model.
    rotary : nn.Module or None
        None when positions are not needed.
    owner : object
        The cache.
    """

    def __init__(self, model: nn.Module, rotary: nn.Module | None, owner: object):
        self._running = threading.local()
        decoder = model.base_model
        self._owner, self._decoder = weakref.ref(owner), weakref.ref(decoder)
        self._names = list(inspect.signature(decoder.forward).parameters)
        handles = [
            decoder.register_forward_pre_hook(Hook(self._enter), with_kwargs=True),
            decoder.register_forward_hook(Hook(self._leave), with_kwargs=True, always_call=True),
        ]
        if rotary is not None:
            handles.append(rotary.register_forward_hook(Hook(self._turn), with_kwargs=True))
        weakref.finalize(self, removed, handles)

    @property
    def _seen(self) -> ForwardSeen | None:
        return getattr(self._running, "seen", None)

    def _enter(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        owner = self._owner()
        if owner is None:  # it goes while another thread runs the model
            return
        ours = decoder is self._decoder() and any(given is owner for given in (*args, *kwargs.values()))
        mask = (dict(zip(self._names, args, strict=False)) | kwargs).get("attention_mask")
        self._running.seen = ForwardSeen(mask, owner.get_seq_length()) if ours else None

    def _turn(self, _rotary: nn.Module, args: tuple, kwargs: dict, _output: object) -> None:
        # `seen` is put down by the first layer's update, so that forwards with other caches pass unseen
        if self._seen is not None:
            self._seen.positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]

    def _leave(self, decoder: nn.Module, _args: tuple, _kwargs: dict, output: object) -> None:
        seen, self._running.seen = self._seen, None
        if seen is not None and decoder is self._decoder() and output is not None:  # None: it raised
            raise CapabilityError(
                "the model was given this cache and handed it no K and V, as in training mode with gradient "
                "checkpointing; call model.eval(), or give the cache to the model whose attention uses it",
                code="capability.no-k-and-v",
            )

    def taken(self) -> ForwardSeen:
        """What was seen of the forward that runs in this thread, once.

        Raises
        ------
        CapabilityError
            No forward of the watched model is running with this cache.
        """
        if (seen := self._seen) is None:
            raise CapabilityError(
                "K and V came to the cache from no forward of the model that it was made for: from another model (a "
                "copy is one), or past the hooks, by .forward(); make a Cache for the model that runs, and call that",
                code="capability.other-forward",
            )
        self._running.seen = None
        return seen


class Hook:
    """A method of a watch as a hook, which does nothing once the watch is gone, nor in a copy of the model.

    While another thread puts a hook up or takes it off, torch may call it without the keyword arguments. That forward
    is none with the watch's cache, since this is not made yet, or gone.
    """

    def __init__(self, method: Callable | None = None):
        self._method = None if method is None else weakref.WeakMethod(method)

    @torch.compiler.disable
    def __call__(self, *given) -> None:
        """Call the method."""
        method = None if self._method is None else self._method()
        if method is not None and len(given) == method.__code__.co_argcount - 1:
            method(*given)

    def __reduce__(self) -> tuple:
        return Hook, ()


def removed(handles: list) -> None:
    """Take hooks off."""
    for handle in handles:
        handle.remove()
