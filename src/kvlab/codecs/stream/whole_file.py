"""What codecs of whole caches are told, and the file that they write: one of coded caches (`stream.cache_file`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Protocol

from torch import Tensor

from kvlab.codecs.base import Encoded
from kvlab.codecs.stream.cache_file import CacheHeader, CacheReader, CacheWriter
from kvlab.core.errors import CalibrationMismatch, StreamError

Cache = Mapping[tuple[int, str], Tensor]
"""K before its rotary embedding, and V, by layer and stream, float [kv_heads, tokens, head_dim]."""
STREAMS = ("k", "v")


class WholeCodec(Protocol):
    """Codes K and V of all layers of a cache into one file, in which every byte counts."""

    def encode(self, cache: Cache, ids: Sequence[int]) -> bytes:
        """The file of a cache of these tokens."""
        ...

    def decode(self, data: bytes, ids: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Layer, K and V, float32 [kv_heads, tokens, head_dim], from the first layer up; `StreamError` for another."""
        ...


@dataclass(frozen=True)
class Owner:
    """Whose caches a codec codes.

    Parameters
    ----------
    layers, heads, head_dim : int
        Of the model; `heads` counts KV heads.
    recipe_id, calibration_hash, model_hash : str
        As in `CacheHeader`.
    """

    layers: int
    heads: int
    head_dim: int
    recipe_id: str
    calibration_hash: str
    model_hash: str

    def refuse_other_shape(self, cache: Cache, ids: Sequence[int]) -> None:
        """`CalibrationMismatch` unless a cache is of all layers of this model, and of these tokens."""
        expected = (self.heads, len(ids), self.head_dim)
        for place in [(layer, stream) for layer in range(self.layers) for stream in STREAMS]:
            found = tuple(cache[place].shape) if place in cache else None
            if found != expected:
                raise CalibrationMismatch(
                    f"layer {place[0]} {place[1]} of the cache has shape {found}, and {expected} is due for {len(ids)}"
                    " tokens of the calibrated model; calibrate this model",
                    code="calibration.other-shape",
                )

    def written(self, frames: Iterable[Encoded], dtype: str, tokens: int, stacked: bool = False) -> bytes:
        """The file of coded tensors; `stacked` where those of all layers are one, heads after heads."""
        layers, heads = (1, self.layers * self.heads) if stacked else (self.layers, self.heads)
        header = CacheHeader(
            layers=layers,
            heads=heads,
            head_dim=self.head_dim,
            tokens=tokens,
            dtype=dtype,
            recipe_id=self.recipe_id,
            calibration_hash=self.calibration_hash,
            model_hash=self.model_hash,
        )
        writer = CacheWriter(file := BytesIO(), header)
        for frame in frames:
            writer.add(frame)
        writer.close()
        return file.getvalue()

    def read(self, data: bytes, ids: Sequence[int], stacked: bool = False) -> CacheReader:
        """A file that was found whole, and of this owner and so many tokens; `StreamError` otherwise."""
        reader = CacheReader(data)
        header = reader.header
        for name in ("recipe_id", "calibration_hash", "model_hash"):
            coded, given = getattr(header, name), getattr(self, name)
            if coded != given:
                raise StreamError(
                    f"the cache was coded with {name} {coded}, given is {given}; decode it with the same",
                    code="stream.other-identity",
                )
        layers, heads = (1, self.layers * self.heads) if stacked else (self.layers, self.heads)
        expected = (layers, heads, len(ids), self.head_dim)
        if (found := (header.layers, header.heads, header.tokens, header.head_dim)) != expected:
            raise StreamError(
                f"the cache is of {found} layers, heads, tokens and dimensions, and {expected} are due",
                code="stream.other-shape",
            )
        return reader


def dtype_of(x: Tensor) -> str:
    """The name of a tensor's dtype."""
    return str(x.dtype).removeprefix("torch.")
