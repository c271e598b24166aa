"""K and V on their way to another process: one stream of bytes, written and read layer by layer.

All integers are little-endian; every part begins at a multiple of 64 bytes, with zeros before it.

    stream := head, frame * (2 * layers), table
    head   := magic "KVLABKVW", u16 version, u16 0, u32 bytes of the text, u64 digest, text (canonical JSON, see `Head`)
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
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from kvlab.core.errors import UserError

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
class Head:
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


def pack(head: Head, cache: Mapping[tuple[int, str], Tensor], key: bytes = b"") -> bytearray:
    """The stream of a whole cache, by layer and stream; see `write` for what is refused."""
    sink = Sink()
    write(sink, head, (((layer, s), cache[layer, s]) for layer in range(head.layers) for s in STREAMS), key)
    return sink.data


def write(
    out: BinaryIO | Sink, head: Head, payloads: Iterable[tuple[tuple[int, str], Tensor]], key: bytes = b""
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


def fits(head: Head, payload: Tensor) -> bool:
    """Whether a payload is what the head says: any bytes of a codec, or exact K and V."""
    if payload.dtype != DTYPES[head.dtype]:
        return False
    return payload.dim() == 1 if head.codec else tuple(payload.shape) == head.shape()


def check_head(head: Head, error: type[Exception]) -> None:
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
