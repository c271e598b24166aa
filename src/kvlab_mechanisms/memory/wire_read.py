"""Read what `wire` wrote: all of it, one layer, or frames as they come out of a pipe."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from kvlab.core.errors import CalibrationMismatch, StreamError
from kvlab_mechanisms.memory.wire import (
    ALIGN,
    DIGEST,
    DTYPES,
    FRAME,
    HEAD,
    MAGIC,
    MOST_TEXT,
    PLACE,
    STREAMS,
    TABLE,
    VERSION,
    Head,
    check_head,
    digest,
    frame_digest,
    table_bytes,
)


class Received:
    """A whole stream in memory; payloads are views of it.

    Parameters
    ----------
    data : bytes-like
        Of any alignment.
    key : bytes
        The one that it was written with.
    model, codec : str or None
        What it has to be of; None takes any.

    Raises
    ------
    StreamError
        It is damaged, cut, of another version or key. Frames are checked when they are read.
    CalibrationMismatch
        It is of another model or codec.
    """

    def __init__(
        self,
        data: bytes | bytearray | memoryview,
        key: bytes = b"",
        model: str | None = None,
        codec: str | None = None,
    ):
        self._data, self._key = memoryview(data).cast("B"), key
        self.head, self._start, first = head_of(self._data, key)
        refuse_other(self.head, model, codec)
        frames = 2 * self.head.layers
        at = len(self._data) - TABLE.size - frames * PLACE.size - DIGEST.size
        if at < first:
            raise StreamError(f"a stream of {self.head.layers} layers does not end within {len(self._data)} bytes")
        raw = self._data[at:]
        self._table = list(PLACE.iter_unpack(raw[TABLE.size : -DIGEST.size]))
        if bytes(raw) != table_bytes(key, self._start, self._table):
            raise StreamError("the end of the stream is damaged, cut, or of another stream or key")
        self._ends = [*(place for place, _ in self._table[1:]), at]
        if [place for place, _ in self._table[:1]] not in ([], [first]):
            raise StreamError("the first frame is not where the table has it")

    def __getitem__(self, place: tuple[int, str]) -> Tensor:
        """A payload: exact [kv_heads, tokens, head_dim], or coded uint8 [bytes]. `StreamError` if it is damaged."""
        layer, stream = place
        number = 2 * layer + STREAMS.index(stream)
        if not 0 <= number < len(self._table):
            raise StreamError(f"the stream has no layer {layer}; it has {self.head.layers}")
        at, promised = self._table[number]
        raw = self._data[at : self._ends[number]]
        if len(raw) < ALIGN:
            raise StreamError(f"layer {layer} {stream} does not lie where the table has it")
        fields = FRAME.unpack(raw[: FRAME.size])
        size = fields[2]
        if len(raw) != ALIGN + size + -size % ALIGN or any(raw[FRAME.size : ALIGN]) or any(raw[ALIGN + size :]):
            raise StreamError(f"layer {layer} {stream} does not lie where the table has it")
        return payload(self.head, self._key, self._start, number, fields, raw[ALIGN : ALIGN + size], promised)

    def __iter__(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """Every payload with its place, in order."""
        for layer in range(self.head.layers):
            for stream in STREAMS:
                yield (layer, stream), self[layer, stream]


def unpack(data: bytes | bytearray | memoryview, key: bytes = b"", **wanted: str) -> dict[tuple[int, str], Tensor]:
    """All payloads of a stream, each checked; see `Received`."""
    return dict(Received(data, key, **wanted))


def read(
    source: BinaryIO, key: bytes = b"", model: str | None = None, codec: str | None = None
) -> Iterator[tuple[tuple[int, str], Tensor]]:
    """Payloads as they come out of a pipe, each checked before it is handed on; raises as `Received` does.

    The last `next` raises `StreamError` where the stream was cut: what came before was right, and not all.
    """
    raw = taken(source, HEAD.size)
    if raw[: len(MAGIC)] == MAGIC:  # else `head_of` says what is wrong
        raw += taken(source, min(HEAD.unpack(raw)[3], MOST_TEXT))
        raw += taken(source, -len(raw) % ALIGN)
    head, start, _ = head_of(memoryview(raw), key)
    refuse_other(head, model, codec)
    table, place = [], len(raw)
    for number in range(2 * head.layers):
        begin = taken(source, ALIGN)
        fields = FRAME.unpack(begin[: FRAME.size])
        most = math.prod(head.shape()) * DTYPES[head.dtype].itemsize if not head.codec else 1 << 40
        if any(begin[FRAME.size :]) or fields[2] > most:
            raise StreamError(f"frame {number} is damaged")
        data = taken(source, fields[2])
        if any(taken(source, -fields[2] % ALIGN)):
            raise StreamError(f"frame {number} is followed by something")
        yield place_of(number), payload(head, key, start, number, fields, memoryview(data), fields[3])
        table.append((place, fields[3]))
        place += ALIGN + len(data) + -len(data) % ALIGN
    wanted = table_bytes(key, start, table)
    if taken(source, len(wanted)) != wanted:
        raise StreamError("the end of the stream is damaged, or of another stream")


def place_of(number: int) -> tuple[int, str]:
    """Layer and stream of a frame."""
    return number // 2, STREAMS[number % 2]


def taken(source: BinaryIO, size: int) -> bytearray:
    """Exactly so many bytes, however they come; memory grows with what has come, not with what was promised."""
    data = bytearray()
    while len(data) < size:
        part = source.read(min(size - len(data), 1 << 20))
        if not part:
            raise StreamError(f"the stream ends {size - len(data)} bytes early")
        data += part
    return data


def head_of(data: memoryview, key: bytes) -> tuple[Head, int, int]:
    """The head, its digest, and where the first frame begins."""
    if len(data) < HEAD.size or bytes(data[:8]) != MAGIC:
        raise StreamError("this is no stream of K and V: it does not begin as one")
    _, version, zero, size, promised = HEAD.unpack(data[: HEAD.size])
    if version != VERSION:
        raise StreamError(f"the stream is of version {version}; this reads version {VERSION}")
    first = HEAD.size + size + -(HEAD.size + size) % ALIGN
    text = data[HEAD.size : HEAD.size + size]
    if size > MOST_TEXT or len(data) < first or any(data[HEAD.size + size : first]):
        raise StreamError("the head of the stream is damaged or cut")
    if promised != digest(key, HEAD.pack(MAGIC, version, zero, size, 0), text):
        raise StreamError("the head of the stream is damaged, or was written with another key")
    try:
        head = Head(**json.loads(bytes(text)))
    except (TypeError, ValueError):  # a digest without a key can be computed by anybody
        raise StreamError("the head of the stream does not say what the stream is of") from None
    check_head(head, StreamError)
    return head, promised, first


def refuse_other(head: Head, model: str | None, codec: str | None) -> None:
    """`CalibrationMismatch` where a stream is of something else than is wanted."""
    for name, wanted, found in (("model", model, head.model), ("codec", codec, head.codec)):
        if wanted is not None and wanted != found:
            raise CalibrationMismatch(
                f"the stream is of {name} {found or 'none'!r}, and {wanted or 'none'!r} is wanted"
            )


def payload(head: Head, key: bytes, start: int, number: int, fields: tuple, data: memoryview, promised: int) -> Tensor:
    """A frame's payload; `StreamError` unless it is what stood there when it was written."""
    layer, stream = place_of(number)
    layers_right = fields[:2] == (layer, STREAMS.index(stream)) and fields[3] == promised
    if not layers_right or promised != frame_digest(key, start, number, layer, stream, data):
        raise StreamError(f"layer {layer} {stream} is damaged, or was written with another key")
    dtype, shape = DTYPES[head.dtype], (len(data),) if head.codec else head.shape()
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise StreamError(f"layer {layer} {stream} has {len(data)} bytes, which is not {list(shape)} {head.dtype}")
    return tensor(data, dtype).view(shape)


def tensor(data: memoryview, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers: a view of them where they may be written to and begin at a number's edge, else a copy."""
    if not len(data):
        return torch.empty(0, dtype=dtype)
    raw = np.frombuffer(data, np.uint8)
    if data.readonly or raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype)
