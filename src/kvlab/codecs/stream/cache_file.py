"""A whole KV cache as one stream: a header, a frame for every layer's K and V, and one digest over them all.

    file   := header, frame * 2 layers, leaf * 2 layers, seal
    header := magic "KVLS", u16 version, u16 layers, u16 heads, u16 head_dim, u32 tokens, u8 dtype, u8 0,
              6 bytes recipe id, 8 bytes calibration digest, 8 bytes model hash, crc
    frame  := see `bitstream`; K and V of layer 0, K and V of layer 1, ...
    leaf   := 32 bytes, that of a frame in the `tree`
    seal   := see `seal`; its root is that of the tree over the header and the frames in their order

All integers are little-endian. A layer that the recipe leaves alone is a frame of the identity codec, so the
length of the file is what the whole cache takes. Writer and reader hold one frame at a time, and `CacheCodec`
what a codec has prepared for one layer.

A file is one whole: header and leaves are held against the root when it is opened, and a frame against its leaf when
it, or a block of it, is read. Frames and blocks of two files, each of them sound, do not make a third. There is one
leaf for each frame and not for each block, for 32 bytes would be a large part of a small block; who reads a block reads
its frame, and nothing of the others.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal

import google_crc32c
import torch

from kvlab.codecs.base import Codec, Encoded, Place
from kvlab.codecs.identity.codec import IdentityCodec
from kvlab.codecs.stream import tree
from kvlab.codecs.stream.bitstream import STREAMS, U32, FrameHeader, frame_bytes, read_frame
from kvlab.codecs.stream.seal import Key, Seal
from kvlab.core import filekind
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import StorageError, StreamError, UserError

MAGIC, VERSION = filekind.CODED, 3
PURPOSE = b"kvlab coded cache 2\n"  # of signatures
HEADER = struct.Struct("<4sHHHHIBB6s8s8s")
DTYPES = ("float32", "bfloat16", "float16")
NO_CALIBRATION = "0" * 16
DIGITS = {"recipe_id": 12, "calibration_hash": 16, "model_hash": 16}  # hexadecimal, of the identities


@dataclass(frozen=True)
class CacheHeader:
    """What a cache is, and what it takes to decode it.

    Parameters
    ----------
    layers, heads, head_dim, tokens : int
        Shape of the cache; `heads` counts KV heads.
    dtype : {"float32", "bfloat16", "float16"}
        Of the cache that was coded.
    recipe_id : str
        Identity of the recipe, 12 hexadecimal digits.
    calibration_hash : str or None
        Of the calibration files, 16 hexadecimal digits; None when the recipe needs none.
    model_hash : str
        Of the model whose cache it is, 16 hexadecimal digits.
    """

    layers: int
    heads: int
    head_dim: int
    tokens: int
    dtype: Literal["float32", "bfloat16", "float16"]
    recipe_id: str
    calibration_hash: str | None
    model_hash: str

    SIZE: ClassVar[int] = HEADER.size + U32.size

    @classmethod
    def overhead(cls, layers: int) -> int:
        """Bytes of a file of so many layers beside its frames: header, leaves and seal."""
        return cls.SIZE + 2 * layers * tree.SIZE + Seal.SIZE

    @property
    def values(self) -> int:
        """Numbers of the whole cache, K and V."""
        return 2 * self.layers * self.heads * self.head_dim * self.tokens

    @property
    def frames(self) -> list[tuple[int, Literal["k", "v"]]]:
        """Layer and stream of each frame, in order."""
        return [(layer, stream) for layer in range(self.layers) for stream in STREAMS]

    def pack(self) -> bytes:
        """The first bytes of the file; `StorageError` when they could not be read back."""
        shape = (self.layers, self.heads, self.head_dim, self.tokens)
        if 0 in shape:
            raise StorageError(f"{self} does not fit a stream's header: no size may be zero", code="storage.zero-size")
        try:
            ids = [self._identity(name) for name in DIGITS]
            raw = HEADER.pack(MAGIC, VERSION, *shape, DTYPES.index(self.dtype), 0, *ids)
        except (struct.error, ValueError) as error:
            raise StorageError(f"{self} does not fit a stream's header: {error}", code="storage.header") from None
        return raw + U32.pack(google_crc32c.value(raw))

    def _identity(self, name: str) -> bytes:
        text = getattr(self, name)
        text = NO_CALIBRATION if text is None and name == "calibration_hash" else text
        if len(text) != DIGITS[name]:
            raise ValueError(f"{name} has {len(text)} digits, it takes {DIGITS[name]}")
        return bytes.fromhex(text)

    @classmethod
    def unpack(cls, data: bytes) -> CacheHeader:
        """Read the header back.

        Raises
        ------
        StreamError
            When it is damaged, says what cannot be, or is of a version that this reader does not know.
        """
        if len(data) < cls.SIZE:
            raise StreamError(f"the stream is cut short: {len(data)} bytes where its header takes {cls.SIZE}")
        raw = data[: HEADER.size]
        magic, version, layers, heads, head_dim, tokens, dtype, zero, recipe, calibration, model = HEADER.unpack(raw)
        if magic != MAGIC:
            raise StreamError(f"this is no coded cache: it begins with {magic!r} instead of {MAGIC!r}")
        if version != VERSION:
            raise StreamError(
                f"the stream has version {version}, this reader knows version {VERSION}; write it anew with"
                " `kvlab encode`",
                code="stream.other-version",
            )
        if google_crc32c.value(raw) != U32.unpack_from(data, HEADER.size)[0]:
            raise StreamError(
                "the checksum of the stream's header is wrong; the stream is damaged", code="stream.checksum"
            )
        if dtype >= len(DTYPES) or zero:
            raise StreamError(
                f"the stream's header names dtype {dtype} and reserved byte {zero};"
                f" known are 0..{len(DTYPES) - 1} and 0",
                code="stream.reserved",
            )
        if 0 in (layers, heads, head_dim, tokens):
            raise StreamError(
                f"the stream's header names {layers} layers of {heads} KV heads of {head_dim} dimensions and"
                f" {tokens} tokens; none of them may be zero",
                code="stream.zero-size",
            )
        known = None if not any(calibration) else calibration.hex()
        return cls(layers, heads, head_dim, tokens, DTYPES[dtype], recipe.hex(), known, model.hex())


class CacheWriter:
    """Writes frames in their order into an open binary file; `close` refuses an incomplete cache, and seals it.

    Parameters
    ----------
    file : BinaryIO
        Empty and open for writing.
    header : CacheHeader
        What the cache is.
    key : Key, optional
        Sign with it.
    """

    def __init__(self, file: BinaryIO, header: CacheHeader, key: Key | None = None):
        self._file, self.header, self._key = file, header, key
        self._due, self._leaves, self.nbytes = iter(header.frames), [], 0
        self._part(header.pack())

    def _part(self, data: bytes) -> None:
        """Write a part of the tree."""
        self._leaves.append(tree.leaf(data))
        self.nbytes += self._file.write(data)

    def add(self, encoded: Encoded) -> None:
        """Write the next frame; `StorageError` when it is not the layer, stream and shape that is due."""
        expected, header = next(self._due, None), self.header
        given = (encoded.layer, encoded.stream)
        shape = (header.heads, header.tokens, header.head_dim)
        if given != expected or tuple(encoded.shape) != shape or not encoded.packed:
            raise StorageError(
                f"layer and stream {given} of shape {list(encoded.shape)} where {expected} of {shape} is due",
                code="storage.out-of-order",
            )
        self._part(frame_bytes(encoded))

    def close(self) -> None:
        """Write leaves and seal; `StorageError` when frames are missing. The file itself stays open."""
        missing = next(self._due, None)
        if missing is not None:
            raise StorageError(
                f"the cache is not complete: the frame of {missing} was never added", code="storage.incomplete"
            )
        seal = Seal.of(tree.root(self._leaves), PURPOSE, self._key)
        self.nbytes += self._file.write(b"".join([*self._leaves[1:], seal.pack()]))


class CacheReader:
    """Reads a coded cache frame by frame, or one block of one frame, and nothing that does not belong to it.

    Parameters
    ----------
    path : Path or bytes
        The file, or all that is in it. It is walked once, from header to header, when it is opened.
    key : Key, optional
        Refuse a file that was not signed with it.

    Attributes
    ----------
    header : CacheHeader
    seal : Seal
        Digest of the whole, and its signature.

    Raises
    ------
    StreamError
        When the file is not exactly the frames that its header promises, header and leaves are not those of its
        root, or it is not signed with `key`.
    StorageError
        When it cannot be read.
    """

    def __init__(self, path: Path | bytes, key: Key | None = None):
        self._data = path if isinstance(path, bytes) else None
        self.path = Path("these bytes") if isinstance(path, bytes) else Path(path)
        try:
            with self._opened() as file:
                first = file.read(CacheHeader.SIZE)
                self.header = CacheHeader.unpack(first)
                self._spans = dict(self._walk(file))
                self._leaves, self.seal = self._sealed(file, first)
            self.seal.refuse_other(key, PURPOSE)
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from None
        except StreamError as error:
            raise StreamError(f"{self.path}: {error}", code=error.code) from None

    def _opened(self) -> BinaryIO:
        return open(self.path, "rb") if self._data is None else BytesIO(self._data)

    def _walk(self, file: BinaryIO) -> Iterator[tuple[tuple[int, str], tuple[int, int]]]:
        rest = CacheHeader.overhead(self.header.layers) - CacheHeader.SIZE
        at, end = CacheHeader.SIZE, file.seek(0, os.SEEK_END) - rest
        expected = (self.header.heads, self.header.tokens, self.header.head_dim)
        for layer, stream in self.header.frames:
            file.seek(at)
            frame = FrameHeader.read(memoryview(file.read(FrameHeader.SIZE)))
            if (frame.layer, frame.stream, frame.shape) != (layer, stream, expected):
                raise StreamError(
                    f"the frame of layer {frame.layer} {frame.stream}, {list(frame.shape)}, stands where layer"
                    f" {layer} {stream}, {list(expected)}, should be"
                )
            if frame.length < FrameHeader.SIZE or at + frame.length > end:
                raise StreamError(f"the stream is cut short at the frame of layer {layer} {stream} or after it")
            yield (layer, stream), (at, frame.length)
            at += frame.length
        if at != end:
            raise StreamError(f"{end - at} bytes too many follow the last frame")

    def _sealed(self, file: BinaryIO, first: bytes) -> tuple[dict[tuple[int, str], bytes], Seal]:
        """Leaf of each frame, and the seal, once the header and they were found to be of one root."""
        file.seek(CacheHeader.SIZE + sum(length for _, length in self._spans.values()))
        leaves = [file.read(tree.SIZE) for _ in self._spans]
        seal = Seal.unpack(file.read(Seal.SIZE))
        if tree.root([tree.leaf(first), *leaves]) != seal.root:
            raise StreamError(
                "its header and frames are not those of its digest; it is damaged, or mixed of several",
                code="stream.root-digest",
            )
        return dict(zip(self._spans, leaves, strict=True)), seal

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return CacheHeader.overhead(self.header.layers) + sum(length for _, length in self._spans.values())

    @property
    def bits_per_value(self) -> float:
        """Bits of the whole file over the numbers of the whole cache."""
        return self.nbytes * 8 / self.header.values

    def frame_bytes(self, layer: int, stream: Literal["k", "v"]) -> int:
        """Bytes of one frame; `UserError` when there is no such frame."""
        return self._span(layer, stream)[1]

    def frame(self, layer: int, stream: Literal["k", "v"], block: int | None = None) -> Encoded:
        """One layer's K or V as stored, or one block of it; other frames are not read.

        Raises
        ------
        StreamError
            When the frame is damaged, or is not the one that belongs to this file.
        UserError
            When the file has no such layer, stream or block.
        """
        at, length = self._span(layer, stream)
        with self._opened() as file:
            file.seek(at)
            data = file.read(length)
        if tree.leaf(data) != self._leaves[layer, stream]:
            raise StreamError(
                f"{self.path}: the frame of layer {layer} {stream} is not the one that was written; the file is"
                " damaged, or mixed of several",
                code="stream.part-digest",
            )
        try:
            return read_frame(data, only=block)
        except IndexError as error:
            raise UserError(
                f"layer {layer} {stream} of {self.path} has no such block: {error}", code="user.no-such-block"
            ) from None

    def _span(self, layer: int, stream: str) -> tuple[int, int]:
        """Place and length of a frame."""
        if (layer, stream) not in self._spans:
            raise UserError(
                f"{self.path} holds no layer {layer} {stream!r}; allowed: layers 0..{self.header.layers - 1} of"
                f" {' and '.join(STREAMS)}",
                code="user.no-such-frame",
            )
        return self._spans[layer, stream]


@dataclass(frozen=True)
class CacheCodec:
    """The codecs of a recipe with the identities that a stream must carry to be decoded by them.

    A codec keeps what it has prepared for the layers that it has met. Every layer therefore gets a codec of
    its own, and only the last one is kept, so that memory does not grow with the layers.

    Parameters
    ----------
    recipe_id, calibration_hash
        As in `CacheHeader`.
    k, v : callable
        Make the codecs of the two streams.
    layers : frozenset of int
        Layers that are coded; the others are stored as they are.
    """

    recipe_id: str
    calibration_hash: str | None
    k: Callable[[], Codec]
    v: Callable[[], Codec]
    layers: frozenset[int]
    _last: dict[tuple[int, str], Codec] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, layer: int, stream: Literal["k", "v"]) -> Codec:
        """The codec of a layer's K or V; made when it is not the one that was asked for last."""
        if layer not in self.layers:
            return IdentityCodec(IdentityStream())
        if (layer, stream) not in self._last:
            self._last.clear()
            self._last[layer, stream] = (self.k if stream == "k" else self.v)()
        return self._last[layer, stream]

    def check(self, header: CacheHeader) -> None:
        """`StreamError` when the stream was coded by another recipe, on other layers or with another calibration."""
        same = {"recipe_id": "the same recipe on the same layers", "calibration_hash": "the same calibration"}
        for name, wanted in same.items():
            coded, given = getattr(header, name), getattr(self, name)
            if coded != given:
                raise StreamError(
                    f"the stream was coded with {name} {coded}, given is {given}; decode it with {wanted}",
                    code="stream.other-identity",
                )

    def decode(self, reader: CacheReader, layer: int, stream: Literal["k", "v"]) -> torch.Tensor:
        """One layer's K or V, float32 [heads, tokens, head_dim]."""
        self.check(reader.header)
        return self.of(layer, stream).decode(reader.frame(layer, stream))

    def decode_block(
        self, reader: CacheReader, layer: int, stream: Literal["k", "v"], index: int
    ) -> tuple[Place, torch.Tensor]:
        """One block of it; nothing else of the file is decoded."""
        self.check(reader.header)
        return self.of(layer, stream).decode_block(reader.frame(layer, stream, index), index)
