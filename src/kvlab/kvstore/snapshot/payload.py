"""A chunk's K and V as bytes: as they are, coded by any codec of the ladder, or as a block of an archive.

    raw   := the tensor [layers, 2, kv_heads, chunk_tokens, head_dim] as it lies in memory, little-endian
    coded := frame of layer 0's K, frame of its V, frame of layer 1's K, ...; see `kvlab.codecs.stream.bitstream`
    block := see `archive`

A chunk is coded by itself, so that a prefix can be read without what follows it. A codec whose blocks are longer
than a chunk therefore codes shorter ones than elsewhere: evidence of what it costs is evidence at this chunk size.
Blocks of an archive are coded by what is known of the whole context, and decoded by themselves too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.hf.sequences import Straight, Turn
from kvlab.calibration.archive import Archive
from kvlab.calibration.needs import needs_calibration
from kvlab.codecs.base import Codec, Site, StreamCalibration, all_finite
from kvlab.codecs.catalogue import TENSORWISE, UNSTORED
from kvlab.codecs.identity.codec import IdentityCodec
from kvlab.codecs.registry import build
from kvlab.codecs.shared.exact_tokens import ExactTokens
from kvlab.codecs.stream.bitstream import STREAMS, FrameHeader, frame_bytes, read_frame
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CapabilityError, ParamsError, StreamError, UserError
from kvlab.core.recipe import WHOLE, Placement, Recipe, StreamRecipe
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.snapshot.archive import ArchiveChunks, Rows
from kvlab.kvstore.snapshot.identity import CodecIdentity, ContextIdentity


class ChunkCoder(Protocol):
    """Turns a context's chunks into bytes and back; `codec` is what a reader must have to do so, None for raw."""

    codec: CodecIdentity | None

    def encoded(self, payloads: Iterable[Tensor], ids: Sequence[int], rows: Rows | None = None) -> Iterator[bytes]:
        """The bytes of each chunk, from the context's first on.

        Parameters
        ----------
        payloads : iterable of Tensor
            Taken one by one, unless the coder goes by layers and `rows` are given.
        ids : sequence of int
            Tokens of these chunks.
        rows : callable, optional
            The same K and V, layer by layer.
        """

    def decode(self, data: bytes, number: int, ids: Sequence[int]) -> Tensor:
        """The tensor of `Geometry.chunk_shape` that the bytes of chunk `number` stand for; `ids` are its tokens.

        Raises
        ------
        StreamError
            When they stand for none.
        """


class ModelCalibration(Protocol):
    """What was fitted for the model; `kvlab.calibration.load.Calibrated` is one."""

    calibration_hash: str
    archive: Archive | None

    def stream(self, recipe: StreamRecipe, which: Literal["k", "v"], placement: Placement) -> StreamCalibration | None:
        """What the codec of this recipe needs."""


class Chunkwise:
    """A coder that codes every chunk by itself."""

    def encoded(self, payloads: Iterable[Tensor], ids: Sequence[int], rows: Rows | None = None) -> Iterator[bytes]:
        """See `ChunkCoder`."""
        return (self.encode(payload, number) for number, payload in enumerate(payloads))


class RawChunks(Chunkwise):
    """Bytes as they are.

    Parameters
    ----------
    geometry : Geometry
        Of the chunks.
    """

    codec = None

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        self._words = np.dtype(f"<i{geometry.torch_dtype.itemsize}")  # numpy does not know bfloat16

    def encode(self, chunk: Tensor, number: int) -> bytes:
        """The bytes of a chunk; `LayoutMismatch` when the tensor is no payload of this geometry."""
        self.geometry.check_payload(chunk)
        words = chunk.detach().view(getattr(torch, self._words.name)).numpy()
        return words.astype(self._words, copy=False).tobytes()

    def decode(self, data: bytes, number: int, ids: Sequence[int] = ()) -> Tensor:
        """See `ChunkCoder`; `StreamError` when there are more or fewer bytes than a chunk has."""
        if len(data) != self.geometry.chunk_bytes:
            raise StreamError(
                f"chunk {number} has {len(data)} bytes where {self.geometry.chunk_bytes} are due", code="stream.length"
            )
        words = np.frombuffer(data, self._words).astype(self._words.newbyteorder("="))
        return torch.from_numpy(words).view(self.geometry.torch_dtype).view(self.geometry.chunk_shape)


class CodedChunks(Chunkwise):
    """Bytes as a recipe's codecs write them, layer by layer.

    Memory is that of what the codecs prepare for all layers: every chunk meets all of them.

    Parameters
    ----------
    geometry : Geometry
        Of the chunks.
    recipe : Recipe
        What is done to K and to V.
    calibration : ModelCalibration or None
        For a recipe that reads one.
    layers : iterable of int, optional
        The coded ones; all of them when left out. The others are stored as they are.
    placement : {"pre_rope", "post_rope"}
        Whether K is turned back before it is coded. Calibrated components are those of K before the rotary
        embedding, so that ``klt`` needs ``pre_rope``.
    turns : sequence of Turn or None
        By layer, the rotary embedding at the context's positions 0, 1, ..; see `kvlab.cache.hf.rope.turns_of`.

    Raises
    ------
    CapabilityError
        A codec of the recipe writes nothing that could be stored.
    ParamsError
        A layer that there is not, or K is to be turned back and no turns are given.
    CalibrationMismatch
        The calibration lacks what the recipe reads.
    """

    def __init__(
        self,
        geometry: Geometry,
        recipe: Recipe,
        calibration: ModelCalibration | None = None,
        layers: Iterable[int] | None = None,
        placement: Placement = "pre_rope",
        turns: Sequence[Turn] | None = None,
    ):
        self.geometry, coded = geometry, range(geometry.layers) if layers is None else layers
        fitted = calibration if needs_calibration(recipe.k) or needs_calibration(recipe.v) else None
        self.codec = CodecIdentity(
            recipe_id=recipe.recipe_id,
            recipe=recipe,
            layers=tuple(sorted(set(coded))),
            placement=placement,
            calibration_hash=fitted.calibration_hash if fitted else None,
        )
        _refuse(self.codec, geometry)
        self._codecs = {s: _built(recipe, s, placement, fitted) for s in STREAMS}
        self._turns_of = self._chosen(turns)

    def _chosen(self, turns: Sequence[Turn] | None) -> Sequence[Turn]:
        """What stands between a chunk's K and the codec, by layer."""
        if self.codec.placement == "post_rope" or isinstance(self.codec.recipe.k, IdentityStream):
            return [Straight()] * self.geometry.layers
        if turns is None:
            raise ParamsError(
                "K is coded before its rotary embedding, and no turns were given that take it there; give the"
                " model's own, or code with placement post_rope",
                code="params.no-turn",
            )
        return turns

    def encode(self, chunk: Tensor, number: int) -> bytes:
        """The bytes of chunk `number`, counted from the context's first.

        Raises
        ------
        LayoutMismatch
            When the tensor is no payload of this geometry.
        NonFinite
            When it holds NaN or infinity, which no codec takes.
        """
        self.geometry.check_payload(chunk)
        return b"".join(self._frame(chunk[layer, part], number, layer, s) for layer, part, s in self._parts())

    def _frame(self, x: Tensor, number: int, layer: int, stream: str) -> bytes:
        if self._turns(layer, stream):
            x = self._turns_of[layer].undo(x, number * self.geometry.chunk_tokens)
        return frame_bytes(self._of(layer, stream).encode(x, Site(number, layer, stream)))

    def decode(self, data: bytes, number: int, ids: Sequence[int] = ()) -> Tensor:
        """See `ChunkCoder`; `StreamError` when the bytes are not exactly the frames that are due."""
        view, at, parts = memoryview(data), 0, []
        for layer, _, stream in self._parts():
            header = self._due(view[at:], layer, stream)
            parts.append(self._tensor(view[at : at + header.length], number, layer, stream))
            at += header.length
        if at != len(view):
            raise StreamError(f"{len(view) - at} bytes follow the last frame of chunk {number}", code="stream.length")
        return torch.stack(parts).view(self.geometry.chunk_shape)

    def _due(self, view: memoryview, layer: int, stream: str) -> FrameHeader:
        """The header of a frame, which must be of this layer, this stream and the geometry's shape."""
        header, geometry = FrameHeader.read(view), self.geometry
        found = (header.layer, header.stream, header.shape)
        if found != (layer, stream, (geometry.kv_heads, geometry.chunk_tokens, geometry.head_dim)):
            raise StreamError(
                f"a frame of {found} stands where layer {layer} {stream} of a chunk should be",
                code="stream.other-frame",
            )
        if not FrameHeader.SIZE <= header.length <= len(view):
            raise StreamError(f"the frame of layer {layer} {stream} is cut short", code="stream.length")
        return header

    def _tensor(self, view: memoryview, number: int, layer: int, stream: str) -> Tensor:
        x = self._of(layer, stream).decode(read_frame(view))
        if self._turns(layer, stream):
            x = self._turns_of[layer].redo(x, number * self.geometry.chunk_tokens)
        x = x.to(self.geometry.torch_dtype)
        if not all_finite(x):
            raise StreamError(
                f"layer {layer} {stream} of chunk {number} does not fit {self.geometry.dtype}", code="stream.too-large"
            )
        return x

    def _parts(self) -> Iterator[tuple[int, int, str]]:
        """Layer, place on the chunk's second axis and stream of each frame, in order."""
        return ((layer, part, s) for layer in range(self.geometry.layers) for part, s in enumerate(STREAMS))

    def _turns(self, layer: int, stream: str) -> bool:
        return stream == "k" and layer in self.codec.layers

    def _of(self, layer: int, stream: str) -> Codec:
        return self._codecs[stream] if layer in self.codec.layers else _AS_IT_IS


_AS_IT_IS = IdentityCodec(IdentityStream())


def _built(recipe: Recipe, stream: str, placement: Placement, calibration: ModelCalibration | None) -> Codec:
    own = getattr(recipe, stream)
    return build(own, calibration.stream(own, stream, placement) if calibration else None)


def _refuse(codec: CodecIdentity, geometry: Geometry) -> None:
    """Refuse codecs that store nothing, and layers that there are not."""
    for stream in STREAMS:
        own = getattr(codec.recipe, stream)
        if own.codec in UNSTORED:
            able = ", ".join(name for name in TENSORWISE if name not in UNSTORED)
            raise CapabilityError(
                f"codec {own.codec!r} of stream {stream} writes no codes to store; allowed: {able}",
                code="capability.no-codes",
            )
        if ExactTokens.of(own):
            raise CapabilityError(
                f"stream {stream} keeps tokens at the ends of a cache as they are, and a chunk does not say whether it"
                " is one; leave sink and recent out of the recipe",
                code="capability.ends",
            )
    if codec.recipe.rotary == "after" and codec.placement != "post_rope":
        raise CapabilityError(
            "the recipe codes K after its rotary embedding; store it with placement post_rope", code="capability.rotary"
        )
    beyond = [layer for layer in codec.layers if not 0 <= layer < geometry.layers]
    if beyond:
        raise ParamsError(
            f"layer {beyond[0]} cannot be coded; the chunks have layers 0 to {geometry.layers - 1}",
            code="params.no-such-layer",
        )


def recipe_coder(
    geometry: Geometry,
    recipe: Recipe,
    calibration: ModelCalibration | None = None,
    layers: Iterable[int] | None = None,
    placement: Placement = "pre_rope",
    turns: Sequence[Turn] | None = None,
) -> ChunkCoder:
    """What stores chunks as a recipe says, whether its codec sees one tensor at a time or all layers.

    Takes and raises what `CodedChunks` and `ArchiveChunks` do.
    """
    if recipe.k.codec not in WHOLE:
        return CodedChunks(geometry, recipe, calibration, layers, placement, turns)
    every = tuple(range(geometry.layers))
    if placement != "pre_rope" or tuple(every if layers is None else sorted(layers)) != every:
        raise CapabilityError(
            f"codec {recipe.k.codec!r} codes K and V of all layers, K before its rotary embedding",
            code="capability.whole-cache",
        )
    return ArchiveChunks(geometry, recipe, calibration.archive if calibration else None, turns)


def coder_for(
    identity: ContextIdentity, calibration: ModelCalibration | None = None, turns: Sequence[Turn] | None = None
) -> ChunkCoder:
    """What decodes the payload of a snapshot of this identity, its recipe taken from there.

    Raises
    ------
    UserError
        When the calibration or the turns that the recipe needs are missing, or the calibration is another than the
        payload's.
    """
    codec = identity.codec
    if codec is None:
        return RawChunks(identity.geometry)
    coder = recipe_coder(identity.geometry, codec.recipe, calibration, codec.layers, codec.placement, turns)
    if coder.codec != codec:
        raise UserError(
            f"the payload was coded with calibration {codec.calibration_hash}, given is {coder.codec.calibration_hash}",
            code="user.other-calibration",
        )
    return coder
