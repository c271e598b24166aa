"""What a cache's codecs hold in memory beside the tokens: made once a process and calibration, and shared.

A calibration says more than coding asks for: `klt` reads sketches and variances to make its tables, and none of them to
code a token. So what it was made from goes when all layers are made. Caches of the same content (of a file its
header, which holds a digest of every tensor; not its name) take the same tables, which go with the last of them.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Literal, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from kvlab.cache.files.decoder_form import read_of
from kvlab.cache.hf.attention_view import BlockReader, Reader
from kvlab.cache.hf.coder import StreamCoder
from kvlab.cache.hf.layer import STREAMS, CodecLayer
from kvlab.cache.hf.served import ServedLayer, with_faults
from kvlab.cache.pages.exact import Ring, kept_exact
from kvlab.cache.pages.layer import LayerPages
from kvlab.cache.pages.layer import compiled as compiles
from kvlab.cache.pages.rope import MeanByPosition, Rotation
from kvlab.cache.pages.token_bytes import Rows, rows_of
from kvlab.calibration.load import Calibrated
from kvlab.calibration.needs import by_position
from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.klt import KltStream
from kvlab.codecs.klt.codec import KltCodec
from kvlab.codecs.klt.rows import KltRows
from kvlab.codecs.registry import bare
from kvlab.codecs.shared.components import Components
from kvlab.core.errors import CalibrationMismatch, CapabilityError
from kvlab.core.memory import give_back
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import WHOLE, Placement, PluginStream, Recipe, StreamRecipe

_HELD: WeakValueDictionary[tuple, Tables | ServedTables] = WeakValueDictionary()
_MAKING = threading.RLock()


class Calibration(Protocol):
    """What was fitted for the model, by stream."""

    def stream(
        self,
        recipe: StreamRecipe,
        which: Literal["k", "v"],
        placement: Placement = "pre_rope",
        by_position: bool = False,
        /,
    ) -> StreamCalibration | None:
        """What the codec of this recipe needs; `placement` is given for K after its rotary embedding only.

        `by_position` as of `Calibrated.stream`, given for `klt` after it only.
        """


@dataclass(frozen=True)
class LayerShape:
    """Layers, KV heads and head size of a model."""

    layers: int
    heads: int
    head_dim: int


class Tables:
    """Coders and readers of all layers, which have coded nothing.

    Parameters
    ----------
    recipe : Recipe
        Codecs of K and V.
    calibration : Calibration or None
        What they read; nothing of it is kept that coding does not ask for.
    shape : Shape
        Of the model's cache.
    device : torch.device
        Where the tokens are.
    quick : bool
        Whether they are read and written by compiled loops.

    Attributes
    ----------
    readers : list of dict of str to Reader
        By layer and stream.
    """

    def __init__(
        self, recipe: Recipe, calibration: Calibration | None, shape: LayerShape, device: torch.device, quick: bool
    ):
        on_cpu = device.type == "cpu"
        made = {stream: _coders(recipe, stream, calibration, shape, on_cpu) for stream in STREAMS}
        self._coders = [dict(zip(STREAMS, pair, strict=True)) for pair in zip(*made.values(), strict=True)]
        self.readers = [{stream: reader_of(one, quick) for stream, one in pair.items()} for pair in self._coders]

    def layers(
        self, windows: list[int | None], turned: frozenset[str], semantics: str, layer_bytes: int | None
    ) -> list[CodecLayer]:
        """Layers of one cache, which count for themselves what they do; see there."""
        own = [{stream: copy.copy(coder) for stream, coder in pair.items()} for pair in self._coders]
        parts = zip(own, self.readers, windows, strict=True)
        return [CodecLayer(coders, turned, semantics, readers, layer_bytes, w) for coders, readers, w in parts]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return bytes_of(self)


class ServedTables:
    """The same of `klt` after its rotary embedding: pages of all layers, which hold nothing."""

    def __init__(self, recipe: Recipe, calibration: Calibration, shape: LayerShape, device: torch.device, quick: bool):
        if device.type != "cpu" and not by_triton(device):
            raise CapabilityError(
                f"klt with rotary: after is held on a CPU, or on a GPU where triton is installed, and the model is on"
                f" {device}; install triton, or give rotary: before",
                code="capability.device",
            )
        ends = kept_exact(recipe, f"recipe {recipe.recipe_id}")
        self.ring = Ring(ends[0], max(1, ends[1]))  # a token reads itself as it is
        rows = {stream: _rows(recipe, stream, calibration, shape, device) for stream in STREAMS}
        self.means = [k.plan.decoding.mean.to(device) for k in rows["k"]]
        nothing = Rotation(torch.empty(0, shape.head_dim))
        make = served_on_gpu(rows["k"] + rows["v"]) if by_triton(device) else partial(LayerPages, loops=quick)
        self._pages = [
            make(layer, k, v, MeanByPosition(nothing, mean))
            for layer, (k, v, mean) in enumerate(zip(rows["k"], rows["v"], self.means, strict=True))
        ]

    def layers(
        self, windows: list[int | None], turned: frozenset[str], semantics: str, layer_bytes: int | None
    ) -> list[ServedLayer]:
        """Layers of one cache.

        Raises
        ------
        CapabilityError
            A layer has a window, or something else than what is served was asked for.
        """
        asked = {
            "layers with a sliding window": any(windows),
            f"semantics {semantics!r}": semantics != "serving",
        }
        for what, found in asked.items():
            if found:
                raise CapabilityError(
                    f"klt with rotary: after takes no {what}; leave it out, or give rotary: before",
                    code="capability.served",
                )
        own = zip(self._pages, self.means, strict=True)
        return with_faults([ServedLayer(copy.copy(pages), mean, self.ring) for pages, mean in own])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return bytes_of(self)


def tables_of(
    recipe: Recipe, calibration: Calibration | None, shape: LayerShape, device: torch.device, compiled: bool = True
) -> Tables | ServedTables:
    """The tables of a recipe and a calibration: those that other caches have, where both are known to be the same.

    Shared is what has an `identity`; a codec of another package never is, since it may count or keep what it will.
    """
    quick = compiled and device.type == "cpu" and compiles()
    given, identity = (recipe, calibration, shape, device, quick), None
    if not any(isinstance(stream, PluginStream) for stream in (recipe.k, recipe.v)):
        identity = getattr(calibration, "identity", None)
    make = kind_of(recipe)
    if identity is None:
        return make(*given)
    key = (identity, recipe.recipe_id, shape, device if make is ServedTables else device.type == "cpu", quick)
    with _MAKING:
        found = _HELD.get(key)
        if found is None:
            found = _HELD[key] = make(*given)
            give_back()
    return found


def kind_of(recipe: Recipe) -> type[Tables | ServedTables]:
    """How a cache of a recipe holds its tokens."""
    return ServedTables if by_position(recipe) else Tables


def by_triton(device: torch.device) -> bool:
    """Whether Triton reads and writes rows on a device: a GPU's; on a CPU where its interpreter was asked for."""
    asked = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return asked and importlib.util.find_spec("triton") is not None


def served_on_gpu(rows: list[Rows]) -> type[LayerPages]:
    """What makes pages on a GPU; `CapabilityError` where its kernels do not know rows like these."""
    from kvlab.cache.pages.gpu import GpuPages

    if not all(isinstance(own, KltRows) and not own.plan.escaping for own in rows):
        raise CapabilityError(
            "on a GPU klt with rotary: after takes klt for V too, and both without escapes; give v: klt and"
            " escape: false, or rotary: before",
            code="capability.served",
        )
    return GpuPages


def _rows(
    recipe: Recipe,
    stream: Literal["k", "v"],
    calibration: Calibration | None,
    shape: LayerShape,
    device: torch.device,
) -> list[Rows]:
    """How one stream's tokens lie in the rows of each layer."""
    own = getattr(recipe, stream)
    where = ("post_rope", True) if stream == "k" else ()
    fitted = calibration.stream(own, stream, *where) if calibration else None
    refuse_more_layers(fitted, shape.layers)
    codec = bare(own, fitted)
    sites = [Site(0, layer, stream) for layer in range(shape.layers)]
    codec.encode(torch.zeros(shape.heads, 1, shape.head_dim), sites[0])  # refuses what decodes alone
    found = [rows_of(codec, site, shape.heads, shape.head_dim, device) for site in sites]
    if isinstance(codec, KltCodec):
        codec.let_go()
    return found


def _coders(
    recipe: Recipe, stream: Literal["k", "v"], calibration: Calibration | None, shape: LayerShape, on_cpu: bool
) -> list[StreamCoder]:
    """One stream's coders by layer; they share the codec."""
    own = getattr(recipe, stream)
    after = ("post_rope",) if recipe.rotary == "after" else ()
    fitted = calibration.stream(own, stream, *after) if calibration else None
    refuse_more_layers(fitted, shape.layers)
    codec = bare(own, lean(fitted, own) if fitted else None)
    sites = [Site(0, layer, stream) for layer in range(shape.layers)]
    found = [StreamCoder(codec, own, site, shape.heads, shape.head_dim, on_cpu) for site in sites]
    if isinstance(codec, KltCodec):
        codec.let_go()
    return found


def lean(fitted: StreamCalibration, own: StreamRecipe) -> StreamCalibration:
    """Components without what the codec does not read; `klt` reads them once, and another package's codec at will."""
    if isinstance(own, KltStream | PluginStream):
        return fitted
    nothing = {field.name: torch.empty(0) for field in fields(Components) if field.name not in read_of(own)}
    return replace(fitted, components={layer: replace(one, **nothing) for layer, one in fitted.components.items()})


def refuse_more_layers(fitted: StreamCalibration | None, layers: int) -> None:
    """`CalibrationMismatch` when something was fitted for a layer that the model does not have."""
    known = {*fitted.whiteners, *fitted.components, *fitted.biases} if fitted else set()
    if known and max(known) >= layers:
        raise CalibrationMismatch(
            f"the calibration has a layer {max(known)}, the model has {layers} layers; calibrate this model",
            code="calibration.more-layers",
        )


def reader_of(coder: StreamCoder, quick: bool) -> Reader:
    """What reads a stream of a layer: `klt` by compiled loops where they are to be had; then it codes by such too."""
    if coder.token_rows is None or not quick:
        return BlockReader(coder)
    from kvlab.cache.hf.klt_columns import KltColumns
    from kvlab.codecs.klt.writing_numba import QuickRows

    reader = KltColumns(coder)
    coder.token_rows = QuickRows(coder.token_rows, reader)
    return reader


def resident_bytes(recipe: Recipe, calibrated: Calibrated, info: ModelInfo) -> int:
    """Bytes that a cache's codecs hold for a model; of a codec of whole caches, those of what was fitted."""
    if recipe.k.codec in WHOLE:
        return bytes_of(calibrated.whole_of(recipe).tensors)
    shape = LayerShape(info.n_layers, info.n_kv_heads, info.head_dim)
    return kind_of(recipe)(recipe, calibrated, shape, torch.device("cpu"), False).nbytes


def bytes_of(*roots: object) -> int:
    """Bytes of the arrays, of torch or numpy, that can be reached from objects; memory that several share counts once.

    Models, and what belongs to modules, classes and functions, is not followed.
    """
    return sum(dict(_memory(list(roots))).values())


def _memory(due: list[object]) -> Iterator[tuple[int, int]]:
    """Where each array's memory begins, and its bytes."""
    seen: dict[int, object] = {}  # holds what it has met, so that no identity is given to another object
    while due:
        one = due.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | nn.Module):
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            yield one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()
        elif isinstance(one, np.ndarray):
            if one.base is not None:
                due.append(one.base)
            else:
                yield one.__array_interface__["data"][0], one.nbytes
        elif isinstance(one, dict):
            due += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            due += one
        else:
            due += vars(one).values() if hasattr(one, "__dict__") else ()
