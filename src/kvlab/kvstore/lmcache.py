"""`archive` as a serde of LMCache: chunks are archived on their way to storage, and decoded on their way back.

LMCache hands a serde a chunk and the chunk's key, a hash, and neither the tokens nor where they stand. `archive` codes
K before its rotary embedding and takes the first layer from the token ids, so whoever registers the serde says of a key
where its chunk stands and what it is of: the process that made the keys knows. What is written is a whole archive of
one chunk, which names its model and its calibration. Imports lmcache, whose 0.5.6 this was written for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    Serializer,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryObj

from kvlab.cache.hf.sequences import Turn
from kvlab.calibration.archive import Archive
from kvlab.codecs.archive.file import load
from kvlab.core.errors import CalibrationMismatch, CapabilityError, StreamError
from kvlab.core.recipe import Recipe

SLACK = 1.01  # of the bytes that are asked for, as `archive` meets its bits within 1 %


class ChunkPlace(NamedTuple):
    """Where a chunk stands: the position of its first token in the text, and its token ids."""

    first: int
    ids: Sequence[int]


@dataclass(frozen=True)
class ArchiveSerde(Serializer, Deserializer):
    """Both directions, for chunks of shape [2, layers, tokens, kv_heads * head_dim], K after its rotary embedding.

    Parameters
    ----------
    archive : Archive
        What `kvlab calibrate --codec archive` fitted.
    recipe : Recipe
        An `archive` with bits: LMCache has to know the size before anything is written.
    turns : sequence of Turn
        By layer, the rotary embedding of positions 0, 1, ..; see `kvlab.cache.hf.rope.turns_of`.
    located : callable
        Gives the `ChunkPlace` of a key.

    Raises
    ------
    CapabilityError
        The recipe has no bits.
    """

    archive: Archive
    recipe: Recipe
    turns: Sequence[Turn]
    located: Callable[[ObjectKey], ChunkPlace]

    def __post_init__(self):
        if getattr(self.recipe.k, "bits", None) is None:
            raise CapabilityError("a serde of LMCache says its size before it writes; give archive by its bits")

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Bytes of a chunk at most."""
        return ceil(SLACK * self.recipe.k.bits * sum(map(prod, layout_desc.shapes)) / 8)

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Write the archive of a chunk to `dst`; its bytes.

        Raises
        ------
        CapabilityError
            The bits cannot be met, as with chunks of a few tokens.
        CalibrationMismatch
            The chunk is of other layers, heads or tokens than the calibration, or than the place that was given.
        """
        place, kv = self.located(key), self._by_head(src.tensor)
        if len(place.ids) != kv.shape[3]:
            raise CalibrationMismatch(
                f"a chunk of {kv.shape[3]} tokens was placed with {len(place.ids)} ids", code="calibration.other-tokens"
            )
        data = self.archive.encode(
            self.recipe, _BeforeRotary(kv, self.turns, place.first), list(place.ids), not place.first
        )
        dst.tensor.flatten()[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return len(data)

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Read an archive into a chunk.

        Raises
        ------
        StreamError
            It is damaged, or of another model, calibration, tokens or position than the key's.
        """
        place, file = self.located(key), load(bytes(src.byte_array))
        if file.header.starts != (place.first == 0):
            raise StreamError("the archive is of another place in its text", code="stream.other-place")
        chunk = torch.empty(self._by_head(dst.tensor).shape, dtype=dst.tensor.dtype)
        for layer, k, v in self.archive.decoded(file, list(place.ids)):
            chunk[0, layer], chunk[1, layer] = self.turns[layer].redo(k, place.first), v
        dst.tensor.copy_(chunk.transpose(2, 3).reshape(dst.tensor.shape))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """[2, layers, kv_heads, tokens, head_dim] of a chunk; refused where it is none of this calibration."""
        own = self.archive.fitted.streams[0, "k"]
        layers, heads, head_dim = self.archive.fitted.layers, own.heads, own.first.shape[1]
        if x.ndim != 4 or x.shape[:2] != (2, layers) or x.shape[3] != heads * head_dim:
            raise CalibrationMismatch(
                f"a chunk of shape {list(x.shape)}; this calibration is for [2, {layers}, tokens, {heads * head_dim}]",
                code="calibration.other-shape",
            )
        return x.unflatten(3, (heads, head_dim)).transpose(2, 3)


class _BeforeRotary(Mapping[tuple[int, str], torch.Tensor]):
    """A chunk's K, its rotary embedding taken off, and V, by layer and stream."""

    def __init__(self, kv: torch.Tensor, turns: Sequence[Turn], first: int):
        self._kv, self._turns, self._first = kv, turns, first

    def __getitem__(self, at: tuple[int, str]) -> torch.Tensor:
        layer, stream = at
        return self._turns[layer].undo(self._kv[0, layer], self._first) if stream == "k" else self._kv[1, layer]

    def __iter__(self):
        return ((layer, stream) for layer in range(self._kv.shape[1]) for stream in ("k", "v"))

    def __len__(self) -> int:
        return 2 * self._kv.shape[1]


def register(name: str, serde: ArchiveSerde) -> None:
    """Make a serde known to LMCache by a name, which ``"serde": {"type": NAME}`` of a storage's settings then says.

    ``max_workers`` there is how many chunks are coded at a time, 1 if it is not given.
    """
    register_serde_factory(
        name, lambda settings: AsyncSerdeProcessor(serde, serde, int(settings.get("max_workers", 1)))
    )
