"""K and V on their way to another process: one stream of bytes, written and read layer by layer.

All integers are little-endian; every part begins at a multiple of 64 bytes, with zeros before it.

    stream := head, frame * (2 * layers), table
    head   := magic "KVLABKVW", u16 version, u16 0, u32 bytes of the text, u64 digest, canonical JSON of a `StreamHead`
    frame  := u32 layer, u32 stream (0: K, 1: V), u64 bytes, u64 digest, payload
    table  := magic "KVLABEND", u32 frames, u32 0, (u64 offset of the frame, u64 digest) * frames, u64 digest

A digest is keyed: BLAKE2b of eight bytes (RFC 7693) with the key that both sides hold, or XXH3-64 where there is none.
XXH3 finds accidents; only a key keeps out who wants to change something. That of a frame is over the head's digest, the
frame's number, layer, stream and length, and its payload: K does not pass for V, nor one layer or context for another.
That of the table is over all digests before it, so that a stream that was cut or put together anew is refused.

Whoever reads from a pipe uses frames as they come and learns at the end that they were all. Whoever has the whole reads
one layer by the table, without the bytes of the others.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvlab.core.errors import CalibrationMismatch, StreamError, UserError

MAGIC, END, VERSION, ALIGN = b"KVLABKVW", b"KVLABEND", 1, 64
HEAD = struct.Struct("<8sHHIQ")
FRAME = struct.Struct("<IIQQ")
TABLE = struct.Struct("<8sII")
PLACE = struct.Struct("<QQ")
DIGEST = struct.Struct("<Q")
STREAMS = ("k", "v")
MOST_TEXT, MOST_LAYERS = 1 << 16, 1 << 12  # bounds of what is allocated on a stranger's word
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "uint8")}

ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class StreamHead:
    """What the stream is of.

    Parameters
    ----------
    model : str
        Fingerprint of the weights.
    codec : str
        Name and digest of what coded the payloads; "" where they are exact.
    dtype : {"float32", "float16", "bfloat16", "uint8"}
        Of the payloads; coded ones are uint8.
    layers, kv_heads, head_dim, tokens : int
    sequence : str
        Whose they are.
    rotary : {"before", "after"}
        Whether K is from before or after its rotary embedding.
    """

    model: str
    codec: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    sequence: str = ""
    rotary: str = "before"

    def shape(self) -> tuple[int, ...]:
        """Of an exact payload, [kv_heads, tokens, head_dim]."""
        return self.kv_heads, self.tokens, self.head_dim


def pack(head: StreamHead, cache: Mapping[tuple[int, str], Tensor], key: bytes = b"") -> bytearray:
    """The stream of a whole cache, by layer and stream; see `write` for what is refused."""
    sink = Sink()
    write(sink, head, (((layer, s), cache[layer, s]) for layer in range(head.layers) for s in STREAMS), key)
    return sink.data


def write(
    out: BinaryIO | Sink, head: StreamHead, payloads: Iterable[tuple[tuple[int, str], Tensor]], key: bytes = b""
) -> None:
    """Write payloads as they come, layers rising, K before V.

    Raises
    ------
    UserError
        A payload is missing, out of order, or not of the head's dtype and shape. What was written is no whole stream.
    """
    check_head(head, UserError)
    text = ENCODER.encode(vars(head)).encode()
    start = digest(key, HEAD.pack(MAGIC, VERSION, 0, len(text), 0), text)
    place = padded(out, HEAD.pack(MAGIC, VERSION, 0, len(text), start) + text)
    expected = ((layer, s) for layer in range(head.layers) for s in STREAMS)
    table: list[tuple[int, int]] = []
    for (layer, stream), payload in payloads:
        if (layer, stream) != next(expected, None) or not fits(head, payload):
            raise UserError(f"layer {layer} {stream} comes out of order, or is not {head.dtype} {list(head.shape())}")
        data = memoryview(payload.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy())
        sum_ = frame_digest(key, start, len(table), layer, stream, data)
        table.append((place, sum_))
        out.write(FRAME.pack(layer, STREAMS.index(stream), len(data), sum_))
        out.write(bytes(ALIGN - FRAME.size))
        out.write(data)
        place += ALIGN + len(data) + padding(out, len(data))
    if next(expected, None):
        raise UserError(f"a cache of {head.layers} layers has {2 * head.layers} payloads; {len(table)} came")
    out.write(table_bytes(key, start, table))


class Sink:
    """Parts that are written, and copied once, when all are there."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []

    def write(self, part: bytes | memoryview) -> None:
        """Append."""
        self.parts.append(part)

    @property
    def data(self) -> bytearray:
        """All of them, one after the other."""
        return bytearray().join(self.parts)


def padded(out: BinaryIO | Sink, part: bytes) -> int:
    """Write a part with the zeros after it; returns the bytes of both."""
    out.write(part)
    return len(part) + padding(out, len(part))


def padding(out: BinaryIO | Sink, size: int) -> int:
    """Write the zeros after a part of this size; returns their number."""
    zeros = -size % ALIGN
    out.write(bytes(zeros))
    return zeros


def table_bytes(key: bytes, start: int, table: list[tuple[int, int]]) -> bytes:
    """The end of the stream."""
    raw = TABLE.pack(END, len(table), 0) + b"".join(PLACE.pack(*entry) for entry in table)
    return raw + DIGEST.pack(digest(key, DIGEST.pack(start), raw))


def fits(head: StreamHead, payload: Tensor) -> bool:
    """Whether a payload is what the head says: any bytes of a codec, or exact K and V."""
    if payload.dtype != DTYPES[head.dtype]:
        return False
    return payload.dim() == 1 if head.codec else tuple(payload.shape) == head.shape()


def check_head(head: StreamHead, error: type[Exception]) -> None:
    """`error` unless the head can be of a stream."""
    sizes = (head.layers, head.kv_heads, head.head_dim, head.tokens)
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
        raise error(f"layers, kv_heads, head_dim and tokens have to be whole numbers from 0, not {sizes}")
    known = head.dtype in DTYPES and head.rotary in ("before", "after") and head.layers <= MOST_LAYERS
    if not known or bool(head.codec) != (head.dtype == "uint8"):
        raise error(f"a stream of dtype {head.dtype!r}, codec {head.codec!r}, rotary {head.rotary!r} is not known")


def digest(key: bytes, *parts: bytes | memoryview) -> int:
    """Of parts one after the other, 64 bits; see the module."""
    state = hashlib.blake2b(key=key, digest_size=8) if key else xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "little")


def frame_digest(key: bytes, start: int, number: int, layer: int, stream: str, data: memoryview) -> int:
    """Of a frame in its place."""
    return digest(key, struct.pack("<QQIIQ", start, number, layer, STREAMS.index(stream), len(data)), data)


# Reading: all of a stream, one layer, or frames as they come out of a pipe.


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
            raise StreamError(
                "the end of the stream is damaged, cut, or of another stream or key", code="stream.digest"
            )
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
    raw = read_exactly(source, HEAD.size)
    if raw[: len(MAGIC)] == MAGIC:  # else `head_of` says what is wrong
        raw += read_exactly(source, min(HEAD.unpack(raw)[3], MOST_TEXT))
        raw += read_exactly(source, -len(raw) % ALIGN)
    head, start, _ = head_of(memoryview(raw), key)
    refuse_other(head, model, codec)
    table, place = [], len(raw)
    for number in range(2 * head.layers):
        begin = read_exactly(source, ALIGN)
        fields = FRAME.unpack(begin[: FRAME.size])
        most = math.prod(head.shape()) * DTYPES[head.dtype].itemsize if not head.codec else 1 << 40
        if any(begin[FRAME.size :]) or fields[2] > most:
            raise StreamError(f"frame {number} is damaged", code="stream.frame")
        data = read_exactly(source, fields[2])
        if any(read_exactly(source, -fields[2] % ALIGN)):
            raise StreamError(f"frame {number} is followed by something")
        yield place_of(number), payload(head, key, start, number, fields, memoryview(data), fields[3])
        table.append((place, fields[3]))
        place += ALIGN + len(data) + -len(data) % ALIGN
    wanted = table_bytes(key, start, table)
    if read_exactly(source, len(wanted)) != wanted:
        raise StreamError("the end of the stream is damaged, or of another stream", code="stream.digest")


def place_of(number: int) -> tuple[int, str]:
    """Layer and stream of a frame."""
    return number // 2, STREAMS[number % 2]


def read_exactly(source: BinaryIO, size: int) -> bytearray:
    """Exactly so many bytes, however they come; memory grows with what has come, not with what was promised."""
    data = bytearray()
    while len(data) < size:
        part = source.read(min(size - len(data), 1 << 20))
        if not part:
            raise StreamError(f"the stream ends {size - len(data)} bytes early")
        data += part
    return data


def head_of(data: memoryview, key: bytes) -> tuple[StreamHead, int, int]:
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
        raise StreamError("the head of the stream is damaged, or was written with another key", code="stream.digest")
    try:
        head = StreamHead(**json.loads(bytes(text)))
    except (TypeError, ValueError):  # a digest without a key can be computed by anybody
        raise StreamError(
            "the head of the stream does not say what the stream is of", code="stream.head-fields"
        ) from None
    check_head(head, StreamError)
    return head, promised, first


def refuse_other(head: StreamHead, model: str | None, codec: str | None) -> None:
    """`CalibrationMismatch` where a stream is of something else than is wanted."""
    for name, wanted, found in (("model", model, head.model), ("codec", codec, head.codec)):
        if wanted is not None and wanted != found:
            raise CalibrationMismatch(
                f"the stream is of {name} {found or 'none'!r}, and {wanted or 'none'!r} is wanted"
            )


def payload(
    head: StreamHead, key: bytes, start: int, number: int, fields: tuple, data: memoryview, promised: int
) -> Tensor:
    """A frame's payload; `StreamError` unless it is what stood there when it was written."""
    layer, stream = place_of(number)
    layers_right = fields[:2] == (layer, STREAMS.index(stream)) and fields[3] == promised
    if not layers_right or promised != frame_digest(key, start, number, layer, stream, data):
        raise StreamError(f"layer {layer} {stream} is damaged, or was written with another key", code="stream.digest")
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
