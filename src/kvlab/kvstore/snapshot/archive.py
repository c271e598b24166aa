"""Chunks of a snapshot as blocks of an archive: coded by what is known of the whole context, decoded each alone.

    chunk := u16 quality, record of one block; see `kvlab.codecs.archive.file`

The steps of a token follow from the attention that it may expect in the context that is saved, and the quality from
the bits that all of it may take. So the bytes of a chunk depend on the tokens after it too: the same first chunk, saved
with another continuation, has other bytes. What it takes to decode them does not: each chunk says its own quality, the
steps of its tokens are in its record, and the first layer needs its own token ids alone. Chunks of two archives of one
calibration can therefore be read side by side; no chunk is ever read as another than the one that was coded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvlab.cache.hf.sequences import Turn
from kvlab.calibration.archive import Archive
from kvlab.codecs.archive.codec import ArchiveBody
from kvlab.codecs.archive.file import parts_of, record_of
from kvlab.codecs.archive.model import STREAMS
from kvlab.codecs.archive.steps import QUALITIES
from kvlab.codecs.base import all_finite
from kvlab.core.errors import CalibrationMismatch, ParamsError, StreamError, UserError
from kvlab.core.recipe import Recipe
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.snapshot.identity import CodecIdentity

QUALITY = struct.Struct("<H")
LENGTH = struct.Struct("<I")  # of what is written of a layer

Rows = Callable[[int], Tensor]
"""K and V of a layer of a context, [2, kv_heads, tokens, head_dim]; K after its rotary embedding."""


class ArchiveChunks:
    """Chunks as blocks of an archive. `recipe.k.block_size` says nothing here: a block is a chunk.

    Parameters
    ----------
    geometry : Geometry
        Of the chunks.
    recipe : Recipe
        Its bits are those of the payload, within 1 %.
    archive : Archive or None
        The fitted codec.
    turns : sequence of Turn or None
        By layer, the rotary embedding at the context's positions 0, 1, ..; see `kvlab.cache.hf.rope.turns_of`.

    Raises
    ------
    CalibrationMismatch
        No codec was fitted, or it is for other layers, heads and dimensions.
    ParamsError
        No turn is given.
    """

    def __init__(self, geometry: Geometry, recipe: Recipe, archive: Archive | None, turns: Sequence[Turn] | None):
        if archive is None:
            raise CalibrationMismatch(
                f"codec {recipe.k.codec!r} reads what was fitted by `kvlab calibrate`; give the file that it wrote",
                code="calibration.missing",
            )
        if turns is None:
            raise ParamsError(
                "K is archived before its rotary embedding; give the model's own turns", code="params.no-turn"
            )
        own = archive.fitted.streams[0, "k"]
        found = (archive.fitted.layers, own.heads, own.first.shape[1])
        if found != (expected := (geometry.layers, geometry.kv_heads, geometry.head_dim)):
            raise CalibrationMismatch(
                f"the calibration is for layers, KV heads and dimensions {found}, the chunks have {expected}; calibrate"
                " this model",
                code="calibration.other-shape",
            )
        self.geometry, self.archive, self._turns = geometry, archive, turns
        self._codec = archive.codec(geometry.chunk_tokens)
        self.codec = CodecIdentity(
            recipe_id=recipe.recipe_id,
            recipe=recipe,
            layers=tuple(range(geometry.layers)),
            placement="pre_rope",
            calibration_hash=archive.digest,
        )

    def encoded(self, payloads: Iterable[Tensor], ids: Sequence[int], rows: Rows | None = None) -> Iterator[bytes]:
        """See `payload.ChunkCoder`. With `rows` two layers are in memory and what was written, else all payloads.

        Raises
        ------
        LayoutMismatch
            A tensor is no payload of this geometry.
        CapabilityError
            The bits cannot be met within 1 %.
        NonFinite
            A value is NaN or infinite.
        """
        cache = BeforeRotary(self.geometry, self._held(payloads) if rows is None else rows, self._turns)
        beside = len(ids) // self.geometry.chunk_tokens * (QUALITY.size + self.geometry.layers * LENGTH.size)
        body = self.archive.body(self.codec.recipe.k, cache, list(ids), self.geometry.chunk_tokens, beside)
        return (QUALITY.pack(body.quality) + record_of(parts) for parts in body.records)

    def _held(self, payloads: Iterable[Tensor]) -> Rows:
        held = list(payloads)
        for payload in held:
            self.geometry.check_payload(payload)
        return lambda layer: torch.cat([payload[layer] for payload in held], dim=2)

    def decode(self, data: bytes, number: int, ids: Sequence[int]) -> Tensor:
        """See `payload.ChunkCoder`; what `Archive.decoded` gives of these tokens, K turned to their positions."""
        try:
            return self._decoded(self._body(data, number), number, ids)
        except StreamError:
            raise
        except UserError as error:  # whoever decodes chose neither the tokens nor what is written
            raise StreamError(f"chunk {number} cannot be decoded: {error}", code="stream.undecodable") from None

    def _body(self, data: bytes, number: int) -> ArchiveBody:
        """A chunk as an archive of one block; the context's first chunk begins its text."""
        if len(data) < QUALITY.size or QUALITY.unpack_from(data)[0] not in QUALITIES:
            raise StreamError(f"chunk {number} names no quality of an archive", code="stream.quality")
        parts = parts_of(data[QUALITY.size :], self.geometry.layers, number)
        size = self.geometry.chunk_tokens
        return ArchiveBody(QUALITY.unpack_from(data)[0], size, size, number == 0, (parts,))

    def _decoded(self, body: ArchiveBody, number: int, ids: Sequence[int]) -> Tensor:
        chunk = torch.empty(self.geometry.chunk_shape, dtype=self.geometry.torch_dtype)
        for layer, k, v in self._codec.decode(body, list(ids)):
            chunk[layer, 0] = self._turns[layer].redo(k, number * self.geometry.chunk_tokens)
            chunk[layer, 1] = v
            if not all_finite(chunk[layer]):
                raise StreamError(
                    f"layer {layer} of chunk {number} does not fit {self.geometry.dtype}", code="stream.too-large"
                )
        return chunk


class BeforeRotary(Mapping[tuple[int, str], Tensor]):
    """A context's K, its rotary embedding taken off, and V, by layer and stream; each is made when it is asked for.

    Parameters
    ----------
    geometry : Geometry
    rows : Rows
        Where they are taken from.
    turns : sequence of Turn
        By layer.
    """

    def __init__(self, geometry: Geometry, rows: Rows, turns: Sequence[Turn]):
        self._geometry, self._rows, self._turns = geometry, rows, turns

    def __getitem__(self, at: tuple[int, str]) -> Tensor:
        layer, stream = at
        k, v = self._rows(layer)
        return self._turns[layer].undo(k, 0) if stream == "k" else v

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return ((layer, stream) for layer in range(self._geometry.layers) for stream in STREAMS)

    def __len__(self) -> int:
        return len(STREAMS) * self._geometry.layers
