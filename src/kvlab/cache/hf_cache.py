"""A transformers `Cache` that holds K and V as a recipe's codecs store them.

    cache = KVCache(model, recipe, calibration, semantics="serving")
    model.generate(**inputs, past_key_values=cache)
    cache.check()

Two semantics, which give different numbers for the same codec:

- ``in_forward``: attention sees every coded token as decoded, those of the running call too. However a
  text is cut into calls, a codec that codes tokens one by one then gives the same logits.
- ``serving``: the tokens of the running call are seen as they were computed, older ones as decoded: what
  a server does. A text that goes through in one call is scored without any trace of the codec.

K arrives after the rotary embedding; it is turned back before it is coded and turned again after it was
decoded (`placement` ``pre_rope``), since that is where calibrations are made, or coded as it arrives
(``post_rope``).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import get_layer_types_and_kwargs

from kvlab.base.errors import CapabilityError, CodecNotActive, UnknownName
from kvlab.base.recipe import IdentityStream, Placement, Recipe
from kvlab.cache.hf_attention import FEW, passes_here, register
from kvlab.cache.hf_layer import Call, CodecLayer, StreamCoding, chosen, kept, repeated
from kvlab.cache.hf_rope import Watch, find_rotary, refuse_lossy, turns
from kvlab.cache.row import Row, Straight
from kvlab.cache.tables import Calibration, Shape, tables_of

Semantics = Literal["in_forward", "serving"]


class KVCache(Cache):
    """The cache of one model under one recipe; pass it as `past_key_values`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model that will use the cache; hooks on it go when the cache does.
    recipe : Recipe
        Codecs of K and V. An ``identity`` stream is stored as it arrives.
    calibration : Calibration or None
        For recipes that need one; made before the rotary embedding.
    semantics : {"serving", "in_forward"}
        What attention sees of the running call's tokens; see the module.
    placement : {"pre_rope", "post_rope"}
        Whether K is turned back before it is coded; never for a recipe with ``rotary: after``.
    window_bytes : int or None
        How much of the cache may also be held decoded, which need not be decoded in every call; None for all of it,
        which is no smaller than an ordinary cache. `nbytes` counts what is coded, `working_bytes` the window,
        `tables_bytes` what the codecs hold.
    compiled : bool
        Whether `klt` may be read and written by loops that numba compiles, where it is installed; without them it is
        several times slower. vLLM 0.32 on a CPU does not start in a process that has loaded numba.

    Raises
    ------
    CapabilityError
        The model has other than full attention layers or a rotary embedding that cannot be turned back, or
        the codec cannot follow a growing cache.
    CalibrationMismatch
        The calibration is missing or belongs to another model.
    UnknownName
        For a semantics or placement that there is not.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        calibration: Calibration | None = None,
        semantics: Semantics = "serving",
        *,
        placement: Placement = "pre_rope",
        window_bytes: int | None = 0,
        compiled: bool = True,
    ):
        for kind, given, allowed in (("semantics", semantics, Semantics), ("placement", placement, Placement)):
            if given not in get_args(allowed):
                raise UnknownName(f"cache {kind}", given, get_args(allowed))
        self.shape = shape_of(model)
        placement = "post_rope" if recipe.rotary == "after" else placement
        self.recipe, self.semantics, self.placement, self.window_bytes = recipe, semantics, placement, window_bytes
        self._model = model
        turned = placement == "pre_rope" and not isinstance(recipe.k, IdentityStream)
        self._rotary = find_rotary(model, self.shape.head_dim) if turned else None
        self._tables = tables = tables_of(recipe, calibration, self.shape, model.device.type == "cpu", compiled)
        where = frozenset("k" if turned else "")
        each = None if window_bytes is None else window_bytes // self.shape.layers
        layers = ((tables.coders(layer), own) for layer, own in enumerate(tables.readers))
        super().__init__(layers=[CodecLayer(pair, where, semantics, own, each) for pair, own in layers])
        register()
        self._forget()

    def _forget(self) -> None:
        """Nothing stored, no forward seen."""
        self.positions: list[Tensor] = []  # by row, without its padding; rows that share a past share it here too
        self._call: Call | None = None
        self._proven = self._rotary is None
        self._watch = Watch(self._model, self._rotary, self)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """See `CodecLayer.update`.

        Raises
        ------
        CapabilityError
            K and V are not of the shape or the model that the cache was made for, or ask for gradients.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise CapabilityError("gradients do not pass through a coded cache; run the model under torch.no_grad()")
        self._refuse_other_shape(key_states, value_states, layer_idx)
        if layer_idx == 0:
            self._call = self._began(key_states)
        if self._call is None:
            raise CapabilityError(f"layer {layer_idx} came to the cache before layer 0; make one for this model")
        seen = self.layers[layer_idx].update(key_states, value_states, self._call)
        if layer_idx == len(self.layers) - 1:
            self._call = None  # and with it the table of cos and sin
        return seen

    def _began(self, k: Tensor) -> Call:
        """Padding and turns of the forward whose first K arrives."""
        batch, _, tokens, _ = k.shape
        rows, seen = self.layers[0].rows["k"], self._watch.taken()
        rows = rows or [Row()] * batch
        # asked only while a row has no token yet: on an accelerator the question waits for the device
        asked = seen.mask is not None and any(row.held == 0 for row in rows)
        pads = new_pads(refuse_other_masks(seen.mask), rows, tokens) if asked else [0] * batch
        whole = tokens > FEW or not self.get_seq_length() or not passes_here(self._model)
        if self._rotary is None:
            return Call(pads, [Straight()] * batch, whole)
        new = self._checked_positions(seen.positions, batch, tokens)
        old = self.positions or [new[0, :0]] * batch
        self.positions = [torch.cat([old[i], new[i, pads[i] :]]) for i in range(batch)]
        call = Call(pads, turns(self._rotary, self._aligned(self.layers[0].get_seq_length() + tokens), k), whole)
        if not self._proven:
            refuse_lossy(call.turns[0], k[0])
            self._proven = True
        return call

    def _aligned(self, length: int) -> Tensor:
        """Positions of all tokens [rows, length], padding at zero."""
        return torch.stack([nn.functional.pad(row, (length - row.numel(), 0)) for row in self.positions])

    def _checked_positions(self, positions: Tensor | None, batch: int, tokens: int) -> Tensor:
        if positions is None or positions.dim() != 2 or positions.shape[1] != tokens:
            given = None if positions is None else list(positions.shape)
            raise CapabilityError(
                f"the rotary module was given positions of shape {given} for {batch} rows of {tokens} tokens; "
                'only [rows, tokens] can be turned back; use placement="post_rope"'
            )
        return positions.to(torch.int32).expand(batch, tokens)

    def _refuse_other_shape(self, k: Tensor, v: Tensor, layer: int) -> None:
        want = (self.shape.heads, self.shape.head_dim)
        if layer >= len(self.layers) or any((x.shape[1], x.shape[3]) != want for x in (k, v)):
            raise CapabilityError(
                f"layer {layer} has K of shape {list(k.shape)} and V of shape {list(v.shape)}; this cache is for "
                f"{len(self.layers)} layers of {want[0]} KV heads of {want[1]} dimensions; make one for this model"
            )
        held = self.layers[layer].batch_size
        if held and held != k.shape[0]:
            raise CapabilityError(
                f"the cache holds {held} rows, the call has {k.shape[0]}; call reset() for a new batch"
            )

    def reset(self) -> None:
        """Forget all tokens and all counts."""
        super().reset()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens (a negative number), or all but the first ones (a positive number)."""
        before = self.get_seq_length()
        length = kept(before, tokens_to_remove)
        super().crop(tokens_to_remove)
        if length < before:
            self.positions = [row[: max(0, length - before + row.numel())].clone() for row in self.positions]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of a beam search; nothing is copied but references."""
        self._select(chosen(beam_idx, self.layers[0].batch_size))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._select(chosen(indices, self.layers[0].batch_size))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._select(repeated(self.layers[0].batch_size, repeats))

    def _select(self, indices: list[int]) -> None:
        for layer in self.layers:
            layer.select(indices)
        self.positions = [self.positions[i] for i in indices] if self.positions else []

    def decoded(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as a later call will see them [batch, heads, tokens, head_dim]."""
        held = self.layers[layer]
        like = torch.empty(1, self.shape.heads, 0, self.shape.head_dim, dtype=held.dtype, device=held.device)
        turn = [Straight()] * held.batch_size
        if self._rotary is not None:
            turn = turns(self._rotary, self._aligned(held.get_seq_length()), like)
        call = Call([0] * held.batch_size, turn)
        return held.decoded("k", like, call), held.decoded("v", like, call)

    def coding(self) -> list[StreamCoding]:
        """What is held and what was done, by layer and stream."""
        return [entry for index, layer in enumerate(self.layers) for entry in layer.coding(index)]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays: codes, exact tails, and positions that turn K. What rows share counts once.

        What the codecs hold is no part of it: see `tables_bytes` and `resident_bytes`.
        """
        positions = {id(row): row.nbytes for row in self.positions}
        return sum(positions.values()) + sum(entry.nbytes for entry in self.coding())

    @property
    def working_bytes(self) -> int:
        """Bytes of the window, what is held decoded beside `nbytes`."""
        return sum(window.nbytes for layer in self.layers for window in layer.windows.values())

    @property
    def tables_bytes(self) -> int:
        """Bytes that the codecs hold, whatever is stored: calibrated matrices and tables.

        Caches of one file of a calibration, in one process, share them; of all of these together they count once.
        """
        return self._tables.nbytes

    @property
    def resident_bytes(self) -> int:
        """All that stays in memory between calls: `nbytes`, `working_bytes` and `tables_bytes`."""
        return self.nbytes + self.working_bytes + self.tables_bytes

    @property
    def bits_per_value(self) -> float:
        """`nbytes` over the numbers stored, in bits; NaN while there is none. Padding counts nowhere."""
        values = sum(entry.values for entry in self.coding())
        return 8 * self.nbytes / values if values else float("nan")

    def check(self) -> list[StreamCoding]:
        """`coding()`, after a look at whether the codec was active; an ``identity`` stream is not asked.

        Raises
        ------
        CodecNotActive
            Tokens passed, but a layer coded none of them, or no attention has read a decoded one.
        """
        entries = self.coding()
        for entry in entries:
            if isinstance(getattr(self.recipe, entry.stream), IdentityStream):
                continue
            place = f"layer {entry.layer} {entry.stream}"
            if entry.fires == 0:
                size = self.layers[entry.layer].coders[entry.stream].size
                raise CodecNotActive(
                    f"{place}: nothing was coded ({entry.exact_tokens} tokens are held exactly, a block has {size}); "
                    "run the model with this cache, or use a smaller block_size"
                )
            if entry.read_back == 0:
                raise CodecNotActive(
                    f"{place}: tokens were coded but no attention has read them, so that no output shows the codec; "
                    "score in several calls, or with semantics='in_forward'"
                )
        return entries

    def __deepcopy__(self, memo: dict) -> KVCache:
        """A cache that goes its own way from here; the blocks, which never change, are shared."""
        twin = copy.copy(self)
        twin.layers = [layer.fork() for layer in self.layers]
        twin._call, twin._watch = None, Watch(self._model, self._rotary, twin)
        return twin


def shape_of(model: nn.Module) -> Shape:
    """The shape of a model's cache; `CapabilityError` for one that is not all full attention over text."""
    config = getattr(model, "config", None)
    if config is None or config.is_encoder_decoder or config.get_text_config() is not config:
        raise CapabilityError(f"{type(model).__name__} is no decoder-only text model; only those are supported")
    kinds, _ = get_layer_types_and_kwargs(config)
    if len(kinds) != config.num_hidden_layers or set(kinds) != {"full_attention"}:
        raise CapabilityError(
            f"{type(model).__name__} has {len(kinds)} cache layers of the kinds {', '.join(sorted(set(kinds)))} for "
            f"{config.num_hidden_layers} layers; only full_attention in every layer is supported"
        )
    heads = config.num_attention_heads
    return Shape(
        layers=config.num_hidden_layers,
        heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def refuse_other_masks(mask: object) -> Tensor:
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
