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
import threading
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import get_layer_types_and_kwargs

from kvlab.cache.hf.attention import FEW, passes_here, register_attention
from kvlab.cache.hf.codec_tables import Calibration, LayerShape, bytes_of, tables_of
from kvlab.cache.hf.layer import Call, CodecLayer, StreamCoding, chosen, kept, repeated
from kvlab.cache.hf.rope import ForwardSeen, Watch, find_rotary, turns, turns_by_layer
from kvlab.cache.hf.sequences import Straight
from kvlab.cache.hf.served import ServedLayer, with_faults
from kvlab.cache.pages.rope import Rotation
from kvlab.cache.rope_turn import refuse_lossy
from kvlab.calibration.needs import by_position
from kvlab.codecs.shared.apart import apart
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.decoder import FULL, SLIDING
from kvlab.core.errors import CapabilityError, CodecNotActive, UnknownName
from kvlab.core.recipe import Placement, Recipe

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
        The model has layers of another kind than full and sliding attention, or a rotary embedding that cannot be
        turned back, or the codec cannot follow a growing cache.
    CalibrationMismatch
        The calibration is missing or belongs to another model.
    UnknownName
        For a semantics or placement that there is not.
    """

    @apart
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
        for kind, name, allowed in (("semantics", semantics, Semantics), ("placement", placement, Placement)):
            if name not in get_args(allowed):
                raise UnknownName(f"cache {kind}", name, get_args(allowed))
        self.shape, windows = shape_of(model), windows_of(model)
        placement = "post_rope" if recipe.rotary == "after" else placement
        self.recipe, self.semantics, self.placement, self.window_bytes = recipe, semantics, placement, window_bytes
        self._model = model
        turned = placement == "pre_rope" and not isinstance(recipe.k, IdentityStream)
        self._served = by_position(recipe)
        self._rotary = find_rotary(model, self.shape.head_dim) if turned or self._served else None
        # blocks are coded where they come; rows where their tables are
        self._stays = model.device if model.device.type == "cpu" or self._served else None
        self._tables = tables_of(recipe, calibration, self.shape, model.device, compiled)
        each = None if window_bytes is None else window_bytes // self.shape.layers
        super().__init__(layers=self._tables.layers(windows, frozenset("k" if turned else ""), semantics, each))
        register_attention()
        self._forget()
        self._watch = Watch(model, self._rotary and self._rotary.module, self)

    def _forget(self) -> None:
        """Nothing stored, no forward seen."""
        self.positions: list[Tensor] = []  # by row, without its padding; rows that share a past share it here too
        self._calls: list[Call] | None = None  # by layer; layers that turn K alike share one
        self._busy = threading.Lock()  # from a forward's first layer to its last
        self._turned_by: list[Tensor] = []  # the rotary module's frequencies when the last tokens came
        self._proven = self._rotary is None
        self._rotations: list[Rotation] = []  # by kind of layer, of positions from 0 on

    @torch.compiler.disable
    @apart
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """See `CodecLayer.update`.

        Raises
        ------
        CapabilityError
            K and V are not of the shape, the dtype, the device or the model that the cache was made for or filled by;
            they ask for gradients; or a forward before did not end, or runs in another thread.
        """
        return self._take(key_states, value_states, layer_idx, self._watch.taken)

    def _take(self, key_states: Tensor, value_states: Tensor, layer_idx: int, taken: Callable[[], ForwardSeen]):
        """`update`, of a forward that `taken` tells of."""
        if key_states.requires_grad or value_states.requires_grad:
            raise CapabilityError(
                "gradients do not pass through a coded cache; run the model under torch.no_grad()",
                code="capability.gradients",
            )
        refuse_other_shape(key_states, value_states, layer_idx, self.shape)
        refuse_other_kind(key_states, self.layers[layer_idx], self._stays)
        if layer_idx == 0:
            self._begin(key_states, taken)
        if self._calls is None:
            raise CapabilityError(
                f"layer {layer_idx} gave K and V to the cache without layer 0 before it; a cache is filled by forwards "
                "that go through all layers of its model, each of them once",
                code="capability.layer-order",
            )
        seen = self.layers[layer_idx].update(key_states, value_states, self._calls[layer_idx])
        if layer_idx == len(self.layers) - 1:
            self.layers[layer_idx].refuse_faults()
            self._calls = None  # and with it the table of cos and sin
            self._busy.release()
        return seen

    @apart
    def fill(self, computed: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Store the first tokens of a text, which this model computed with another cache.

        Under ``serving`` that is what a forward of these tokens with this cache would store, to the bit, since it sees
        its own tokens as they are. So one forward serves any number of caches.

        Parameters
        ----------
        computed : sequence of tuple of Tensor
            K after its rotary embedding, and V, of every layer [batch, heads, tokens, head_dim], without padding, from
            position 0 on.

        Raises
        ------
        CapabilityError
            The cache holds tokens, is not of ``serving``, or K and V are none that its model could have given it.
        """
        if self.get_seq_length() or self.semantics != "serving":
            raise CapabilityError(
                f"a cache is filled while it is empty, and under serving; this one holds {self.get_seq_length()} tokens"
                f" under {self.semantics}",
                code="capability.fill",
            )
        tokens = computed[0][0].shape[2]
        seen = ForwardSeen(None, 0, torch.arange(tokens, device=computed[0][0].device)[None])
        for layer, pair in enumerate(computed):
            self._take(*pair, layer, lambda: seen)

    def _begin(self, k: Tensor, taken: Callable[[], ForwardSeen]) -> None:
        """Take note of the forward whose first K arrives."""
        if not self._busy.acquire(blocking=False):
            raise CapabilityError(
                "a forward with this cache ended before its last layer, or still runs in another thread, so that its "
                "layers hold different tokens; call reset() and give the text again, and each thread a cache of its "
                "own",
                code="capability.half-forward",
            )
        try:
            self._calls = self._began(k, taken())
        except BaseException:
            self._busy.release()
            raise

    def _began(self, k: Tensor, seen: ForwardSeen) -> list[Call]:
        """Padding and turns of the forward whose first K arrives, by layer."""
        batch, _, tokens, _ = k.shape
        held, length = self.layers[0].padding_and_held, self.get_seq_length()
        if seen.held != length:
            raise CapabilityError(
                f"the cache held {seen.held} tokens when this forward began and holds {length} now: another thread used"
                " it in between; give each thread a cache of its own",
                code="capability.threads",
            )
        held = held or [(0, 0)] * batch
        # asked only while a row has no token yet: on an accelerator the question waits for the device
        asked = seen.mask is not None and any(own == 0 for _, own in held)
        pads = new_pads(shown(seen.mask), held, tokens) if asked else [0] * batch
        whole = tokens > FEW or not length or not passes_here(self._model)
        if self._rotary is None:
            return [Call(pads, [Straight()] * batch, whole)] * len(self.layers)
        new = positions(seen.positions, batch, tokens)
        before, self._turned_by = self._turned_by, list(self._rotary.module.buffers())
        if length:
            refuse_other_frequencies(before, self._turned_by)
        old = self.positions or [new[0, :0]] * batch
        found = [torch.cat([old[i], new[i, pads[i] :]]) for i in range(batch)]
        if self._served:
            refuse_other_positions(found)
        self.positions = found
        if self._served:
            self._turn_up_to(length + tokens, k)
            return [Call(pads, [], whole, self.layers[0].call(pads, tokens, k.device))] * len(self.layers)
        made = turns_by_layer(self._rotary, self._aligned(length + tokens), k)
        if not self._proven:
            refuse_lossy(made[0][0], k[0])
            self._proven = True
        return [Call(pads, own, whole) for own in made]

    def _turn_up_to(self, length: int, like: Tensor) -> None:
        """Tell layers of `served` how positions below `length` are turned, and some more."""
        if self._rotations and length <= len(self._rotations[0]):
            return
        all_of_them = torch.arange(length + max(256, length // 4), device=like.device)[None]
        made = {layer: turns(self._rotary, layer, all_of_them, like)[0] for layer in self._rotary.distinct()}
        of_kind = {self._rotary.kinds[layer]: Rotation(turn.table) for layer, turn in made.items()}
        self._rotations = list(of_kind.values())
        for layer, kind in zip(self.layers, self._rotary.kinds, strict=True):
            layer.turn(of_kind[kind])

    def _aligned(self, length: int) -> Tensor:
        """Positions of all tokens [rows, length], padding at zero."""
        return torch.stack([nn.functional.pad(row, (length - row.numel(), 0)) for row in self.positions])

    @torch.compiler.disable  # which would make the model anew for each length, and so for each token
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each row, padding included."""
        return super().get_seq_length(layer_idx)

    @torch.compiler.disable
    def get_mask_sizes(self, *args, **kwargs) -> tuple[int, int]:
        """Length and offset of what attention sees."""
        return super().get_mask_sizes(*args, **kwargs)

    def reset(self) -> None:
        """Forget all tokens and all counts."""
        super().reset()
        self._forget()

    @property
    def is_croppable(self) -> bool:
        """Whether a crop leaves no trace in any layer; transformers 5.15 does not ask."""
        return all(layer.is_croppable for layer in self.layers)

    @apart
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens (a negative number), or all but the first ones (a positive number)."""
        before = self.get_seq_length()
        length = kept(before, tokens_to_remove)
        super().crop(tokens_to_remove)
        if length < before:
            self.positions = [row[: max(0, length - before + row.numel())].clone() for row in self.positions]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of a beam search; layers of blocks copy nothing but references."""
        self._select(chosen(beam_idx, self.layers[0].batch_size))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._select(chosen(indices, self.layers[0].batch_size))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._select(repeated(self.layers[0].batch_size, repeats))

    @apart
    def _select(self, indices: list[int]) -> None:
        for layer in self.layers:
            layer.select(indices)
        self.positions = [self.positions[i] for i in indices] if self.positions else []

    @apart
    def decoded(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as a later call will see them [batch, heads, tokens, head_dim]; zero where they are gone.

        That is what a layer's window has left.
        """
        held = self.layers[layer]
        like = torch.empty(1, self.shape.heads, 0, self.shape.head_dim, dtype=held.dtype, device=held.device)
        turn = [Straight()] * held.batch_size
        if self._rotary is not None:
            turn = turns(self._rotary, layer, self._aligned(held.get_seq_length()), like)
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
        """Bytes of what is held decoded beside `nbytes`, and of what tells layers of `served` of positions."""
        return sum(layer.working_bytes for layer in self.layers) + bytes_of(self._rotations)

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
                size = self.layers[entry.layer].block_size(entry.stream)
                raise CodecNotActive(
                    f"{place}: nothing was coded ({entry.exact_tokens} tokens are held exactly, a block has {size}); "
                    "run the model with this cache, or use a smaller block_size",
                    code="not-active.nothing-coded",
                )
            if entry.read_back == 0:
                raise CodecNotActive(
                    f"{place}: tokens were coded but no attention has read them, so that no output shows the codec; "
                    "score in several calls, or with semantics='in_forward'",
                    code="not-active.not-read",
                )
        return entries

    @apart
    def __deepcopy__(self, memo: dict) -> KVCache:
        """A cache that goes its own way from here; blocks, which never change, are shared, other bytes copied."""
        if self._calls is not None:
            raise CapabilityError(
                "a forward with this cache ended before its last layer, or still runs in another thread; a copy would "
                "hold half of it; call reset() and give the text again",
                code="capability.half-forward",
            )
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin.layers = [layer.fork() for layer in self.layers]
        if self._served:
            with_faults(twin.layers)
        twin._busy, twin._watch = threading.Lock(), Watch(self._model, self._rotary and self._rotary.module, twin)
        return twin

    def __copy__(self) -> KVCache:
        """As `copy.deepcopy`."""
        return copy.deepcopy(self)

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Refused: a cache goes with its model's object in this process."""
        raise CapabilityError(
            "a Cache cannot be pickled or saved: it watches its model in this process; copy it with copy.deepcopy, or "
            "keep a text's K and V in a file with `kvlab snapshot save`",
            code="capability.pickle",
        )


def shape_of(model: nn.Module) -> LayerShape:
    """The shape of a model's cache; `CapabilityError` for one that is not all attention over text."""
    config = getattr(model, "config", None)
    if config is None or config.is_encoder_decoder or config.get_text_config() is not config:
        raise CapabilityError(
            f"{type(model).__name__} is no decoder-only text model; only those are supported",
            code="capability.architecture",
        )
    kinds, _ = get_layer_types_and_kwargs(config)
    if len(kinds) != config.num_hidden_layers or not set(kinds) <= {FULL, SLIDING}:
        raise CapabilityError(
            f"{type(model).__name__} has {len(kinds)} cache layers of the kinds {', '.join(sorted(set(kinds)))} for "
            f"{config.num_hidden_layers} layers; each must be one of {FULL} and {SLIDING}",
            code="capability.layer-kinds",
        )
    heads = config.num_attention_heads
    return LayerShape(
        layers=config.num_hidden_layers,
        heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def windows_of(model: nn.Module) -> list[int | None]:
    """By layer of a model that has a shape, the last tokens that a token sees, itself among them; None for all."""
    kinds, _ = get_layer_types_and_kwargs(model.config)
    return [model.config.sliding_window if kind == SLIDING else None for kind in kinds]


# What a cache is given by a model's forward, held against what it was made for and what it holds.


def refuse_other_shape(k: Tensor, v: Tensor, layer: int, shape: LayerShape) -> None:
    """`CapabilityError` unless K and V are of a layer that the cache has, and of its shape."""
    want = (shape.heads, shape.head_dim)
    if layer >= shape.layers or any((x.shape[1], x.shape[3]) != want for x in (k, v)):
        raise CapabilityError(
            f"layer {layer} has K of shape {list(k.shape)} and V of shape {list(v.shape)}; this cache is for "
            f"{shape.layers} layers of {want[0]} KV heads of {want[1]} dimensions, as its model had when it was made; "
            "make one for the model that runs, with all its heads in this process",
            code="capability.other-shape",
        )


def refuse_other_kind(k: Tensor, held: CodecLayer | ServedLayer, stays: torch.device | None) -> None:
    """`CapabilityError` unless K is as many rows as a layer holds, of its dtype, and where the cache can code it."""
    if k.is_meta:
        raise CapabilityError(
            "the model is on the meta device, where it has no numbers; load its weights first",
            code="capability.meta-device",
        )
    if stays is not None and k.device != stays:
        raise CapabilityError(
            f"K is on {k.device}, and this cache was made while its model was on {stays}; make one after it was moved",
            code="capability.moved",
        )
    if held.batch_size and held.batch_size != k.shape[0]:
        raise CapabilityError(
            f"the cache holds {held.batch_size} rows, the call has {k.shape[0]}; call reset() for a new batch",
            code="capability.batch",
        )
    if held.is_initialized and (held.dtype, held.device) != (k.dtype, k.device):
        raise CapabilityError(
            f"the cache holds K in {held.dtype} on {held.device}, and this call has {k.dtype} on {k.device}: the model "
            "was moved, or autocast begun or ended, in the middle of a text; call reset() and give the text again",
            code="capability.moved",
        )


def positions(found: Tensor | None, batch: int, tokens: int) -> Tensor:
    """The positions that a forward gave its rotary module, int32 [batch, tokens]; `CapabilityError` for others."""
    if found is None:
        raise CapabilityError(
            "the forward did not ask the model's rotary module (rotary_emb), so that K cannot be turned back; "
            'use placement="post_rope", which codes K as the cache is handed it',
            code="capability.no-positions",
        )
    if found.dim() != 2 or found.shape[0] not in (1, batch) or found.shape[1] != tokens:
        raise CapabilityError(
            f"this forward gives positions of shape {list(found.shape)} to {batch} rows of {tokens} tokens; K is turned"
            f' back by one position for each token, shape [{batch}, {tokens}]; use placement="post_rope"',
            code="capability.positions",
        )
    return found.to(torch.int32).expand(batch, tokens)


def refuse_other_positions(found: Sequence[Tensor]) -> None:
    """`CapabilityError` unless positions of each row count from 0 on."""
    for row in found:
        if not torch.equal(row, torch.arange(len(row), dtype=row.dtype, device=row.device)):
            raise CapabilityError(
                "klt with rotary: after is held for positions that count from 0 on in every row, and this forward has"
                " others; give position_ids that do, as generate() does of padded rows, or take rotary: before",
                code="capability.positions",
            )


def refuse_other_frequencies(before: Sequence[Tensor], now: Sequence[Tensor]) -> None:
    """`CapabilityError` when a rotary module's buffers are not those that turned the tokens in the cache."""
    # what is the same tensor need not be compared, for which an accelerator would be waited for
    others = [(a, b) for a, b in zip(before, now, strict=True) if a is not b]
    if not all(a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in others):
        raise CapabilityError(
            "the model's rotary frequencies are others than those that turned the tokens in the cache, as after "
            "model.to() to another dtype and back; call reset() and give the text again",
            code="capability.other-rope",
        )


def shown(mask: object) -> Tensor:
    """The mask itself; `CapabilityError` unless padding can be read from it."""
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask
    given = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"as {type(mask).__name__}"
    raise CapabilityError(
        f"the attention mask came {given}, padding can only be read from one [rows, tokens]; give that, or none",
        code="capability.mask",
    )


def new_pads(mask: Tensor, held: Sequence[tuple[int, int]], tokens: int) -> list[int]:
    """Padding on the left that each row's next `tokens` tokens begin with, from the mask [batch, all tokens].

    `held` are the padding and the tokens that it has.
    """
    lead = (mask.long().cumsum(dim=1) == 0).sum(dim=1).tolist()
    rows = zip(held, lead, strict=True)
    return [0 if has else max(0, min(tokens, before - pads)) for (pads, has), before in rows]
