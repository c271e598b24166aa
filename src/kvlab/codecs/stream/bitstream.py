"""One coded tensor as bytes: a frame of independent, checksummed blocks.

All integers are little-endian; a varint is LEB128 (seven bits a byte, low ones first).

    frame   := header, crc, [shared], block * n_blocks
    header  := u32 bytes of the frame, u16 layer, u8 stream, u8 flags,
               u16 heads, u16 head_dim, u32 tokens, u32 n_blocks
    shared, block
            := u32 bytes of the payload, payload, crc
    payload := u8 number of arrays, descriptor * arrays, the arrays' bytes one after the other
    descriptor
            := u8 (dtype in the low four bits, dimensions in the high four), varint per dimension
    crc     := u32, CRC-32C. A section's covers the header's crc, the section's number (0: shared), its
               length and its payload, so that a block that was moved to another place is found out.

A reader looks at nothing before its checksum has been found right, takes views of the bytes it was given and
refuses what does not fill them exactly: it never allocates by what a length in the stream promises.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from kvlab.codecs.base import Arrays, Encoded
from kvlab.core.errors import StorageError, StreamError

HEADER = struct.Struct("<IHBBHHII")
U32 = struct.Struct("<I")
STREAMS = ("k", "v")
UNPACKED, SHARED = 1, 2
# The place in this list is the number in the stream: new dtypes go to the end.
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int32,
    torch.float16,
    torch.bfloat16,
    torch.float32,
)
CARRIERS = {torch.bfloat16: torch.int16}  # numpy does not know these; they travel as equally wide integers
MAX_DIMENSIONS = 8
MAX_VARINT = 5
MAX_ARRAYS = 255
MAX_EMPTY = 1 << 31  # product of the dimensions of an empty array, zeros left out; no byte limits it


@dataclass(frozen=True)
class FrameHeader:
    """What the first bytes of a frame say; `shared` tells whether a shared section follows."""

    length: int
    layer: int
    stream: Literal["k", "v"]
    packed: bool
    shared: bool
    shape: tuple[int, int, int]
    n_blocks: int
    crc: int

    SIZE: ClassVar[int] = HEADER.size + U32.size

    @classmethod
    def read(cls, data: memoryview) -> FrameHeader:
        """The header at the front of `data`; `StreamError` when it is cut short, damaged or impossible."""
        if len(data) < cls.SIZE:
            raise StreamError(f"the frame is cut short: {len(data)} bytes where its header takes {cls.SIZE}")
        raw = bytes(data[: HEADER.size])
        (crc,) = U32.unpack_from(data, HEADER.size)
        if google_crc32c.value(raw) != crc:
            raise StreamError(
                "the checksum of the frame's header is wrong; the stream is damaged", code="stream.checksum"
            )
        length, layer, stream, flags, heads, head_dim, tokens, n_blocks = HEADER.unpack(raw)
        if stream >= len(STREAMS) or flags & ~(UNPACKED | SHARED):
            raise StreamError(f"the frame's header names stream {stream} and flags {flags:#x}, which do not exist")
        if 0 in (heads, head_dim, tokens, n_blocks):
            raise StreamError(
                f"the frame holds {n_blocks} blocks of a tensor of shape [{heads}, {tokens}, {head_dim}]",
                code="stream.zero-size",
            )
        shape = (heads, tokens, head_dim)
        return cls(length, layer, STREAMS[stream], not flags & UNPACKED, bool(flags & SHARED), shape, n_blocks, crc)


def frame_bytes(encoded: Encoded) -> bytes:
    """The frame of one coded tensor.

    Raises
    ------
    StorageError
        When a size is zero or does not fit its field, or an array has a dtype that the format does not know.
    """
    if 0 in (*encoded.shape, len(encoded.blocks)):
        raise StorageError(
            f"{len(encoded.blocks)} blocks of a tensor of shape {list(encoded.shape)} are no frame; none may be zero",
            code="storage.zero-size",
        )
    shared = [_payload(encoded.shared)] if encoded.shared else []
    payloads = [*shared, *map(_payload, encoded.blocks)]
    length = FrameHeader.SIZE + sum(len(payload) + 2 * U32.size for payload in payloads)
    heads, tokens, head_dim = encoded.shape
    flags = (0 if encoded.packed else UNPACKED) | (SHARED if encoded.shared else 0)
    stream = STREAMS.index(encoded.stream)
    try:
        header = HEADER.pack(
            length, encoded.layer, stream, flags, heads, head_dim, tokens, len(encoded.blocks)
        )  # fmt: skip
    except struct.error as error:
        raise StorageError(
            f"a tensor of shape {list(encoded.shape)} at layer {encoded.layer} with {len(encoded.blocks)} blocks"
            f" of {length} bytes does not fit a frame: {error}",
            code="storage.header",
        ) from None
    crc = google_crc32c.value(header)
    parts = [header, U32.pack(crc)]
    for number, payload in enumerate(payloads, start=0 if shared else 1):
        parts += [U32.pack(len(payload)), payload, U32.pack(_section_crc(crc, number, payload))]
    return b"".join(parts)


def read_frame(data: bytes | memoryview, only: int | None = None) -> Encoded:
    """The coded tensor that `frame_bytes` wrote.

    Parameters
    ----------
    data : bytes or memoryview
        Exactly one frame.
    only : int, optional
        Read one block alone, for `Codec.decode_block`; the others are left empty and not even checked.

    Returns
    -------
    Encoded
        On the CPU, with arrays that own their memory.

    Raises
    ------
    StreamError
        When a checksum is wrong, or the bytes are not exactly one frame.
    """
    data = memoryview(data).cast("B")
    header = FrameHeader.read(data)
    if len(data) != header.length:
        raise StreamError(f"the frame is {len(data)} bytes long where its header says {header.length}")
    return _read(data, header, only)


def _read(data: memoryview, header: FrameHeader, only: int | None) -> Encoded:
    """The coded tensor of a frame that is as long as its header says."""
    if only is not None and not 0 <= only < header.n_blocks:
        raise IndexError(f"block {only} of a frame with blocks 0..{header.n_blocks - 1}")
    shared: Arrays = ()
    blocks: list[Arrays] = []
    for number, at, length in _sections(data, header):
        if only is not None and number not in (0, only + 1):
            blocks.append(())
            continue
        payload = data[at : at + length]
        (crc,) = U32.unpack_from(data, at + length)
        if _section_crc(header.crc, number, payload) != crc:
            what = f"block {number - 1}" if number else "the shared part"
            raise StreamError(
                f"the checksum of {what} of layer {header.layer} {header.stream} is wrong", code="stream.checksum"
            )
        if number:
            blocks.append(_arrays(payload))
        else:
            shared = _arrays(payload)
    return Encoded(header.shape, header.layer, header.stream, shared, tuple(blocks), packed=header.packed)


def _sections(data: memoryview, header: FrameHeader) -> Iterator[tuple[int, int, int]]:
    """Number, place and length of each section's payload; with their checksums they must fill the frame exactly."""
    at = FrameHeader.SIZE
    for number in range(0 if header.shared else 1, header.n_blocks + 1):
        if header.length - at < 2 * U32.size:
            raise StreamError(f"the frame ends before its section {number} of {header.n_blocks}")
        (length,) = U32.unpack_from(data, at)
        start, end = at + U32.size, at + U32.size + length
        if end + U32.size > header.length:
            raise StreamError(f"section {number} is {length} bytes long, the frame has {header.length - start} left")
        yield number, start, length
        at = end + U32.size
    if at != header.length:
        raise StreamError(f"{header.length - at} bytes follow the last block of the frame")


def _section_crc(header_crc: int, number: int, payload: bytes | memoryview) -> int:
    front = google_crc32c.value(U32.pack(header_crc) + U32.pack(number) + U32.pack(len(payload)))
    return google_crc32c.extend(front, bytes(payload))


def _payload(arrays: Arrays) -> bytes:
    if len(arrays) > MAX_ARRAYS:
        raise StorageError(
            f"{len(arrays)} arrays do not fit a section; allowed: 0..{MAX_ARRAYS}", code="storage.too-many-arrays"
        )
    head = [bytes([len(arrays)])]
    for array in arrays:
        if array.dtype not in DTYPES or array.ndim > MAX_DIMENSIONS:
            raise StorageError(
                f"an array of {array.ndim} dimensions of {array.dtype} cannot be stored in a stream",
                code="storage.array",
            )
        if _boundless(array.shape):
            raise StorageError(
                f"an empty array of shape {list(array.shape)} cannot be stored in a stream", code="storage.empty-array"
            )
        head.append(bytes([DTYPES.index(array.dtype) | array.ndim << 4]))
        head += [_varint(size) for size in array.shape]
    return b"".join([*head, *map(_raw, arrays)])


def _raw(array: Tensor) -> bytes:
    array = array.detach().cpu().contiguous()
    return array.view(CARRIERS.get(array.dtype, array.dtype)).numpy().tobytes()


def _arrays(payload: memoryview) -> Arrays:
    """The arrays of a section whose checksum was right; still nothing in it is believed."""
    at, heads = 1, []
    try:
        for _ in range(payload[0]):
            tag = payload[at]
            at += 1
            shape = []
            for _ in range(tag >> 4):
                size, at = _read_varint(payload, at)
                shape.append(size)
            heads.append((DTYPES[tag & 15], tuple(shape)))
    except IndexError:
        raise StreamError("the description of the arrays is cut short or names a dtype that does not exist") from None
    sizes = [prod(shape) * dtype.itemsize for dtype, shape in heads]
    if at + sum(sizes) != len(payload) or any(len(shape) > MAX_DIMENSIONS for _, shape in heads):
        raise StreamError(f"arrays of {sum(sizes)} bytes do not fill a section that has {len(payload) - at} for them")
    arrays = []
    for (dtype, shape), size in zip(heads, sizes, strict=True):
        arrays.append(_array(payload[at : at + size], dtype, shape))
        at += size
    return tuple(arrays)


def _array(raw: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not raw:
        if _boundless(shape):
            raise StreamError(f"an empty array of shape {list(shape)}", code="stream.empty-array")
        return torch.empty(shape, dtype=dtype)
    carrier = CARRIERS.get(dtype, dtype)
    values = np.frombuffer(raw, dtype=str(carrier).removeprefix("torch.")).reshape(shape).copy()
    return torch.from_numpy(values).view(dtype)


def _boundless(shape: tuple[int, ...]) -> bool:
    """Whether an array is empty and its other dimensions promise more than an array can be."""
    return 0 in shape and prod(max(size, 1) for size in shape) > MAX_EMPTY


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(MAX_VARINT):
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte <= 0x7F:
            return value, at + place + 1
    raise StreamError(f"a dimension takes more than {MAX_VARINT} bytes")
