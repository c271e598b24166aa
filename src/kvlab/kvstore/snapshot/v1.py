"""Reader of the published KVFLASH1 layout. Read only: what it leaves out cannot be trusted, so nothing writes it.

    file   := u64 magic, u32 chunks, u32 chunk_tokens, u32 kv_heads, u32 bytes of a head's K, u32 bytes of a head's V,
              u32 bytes of a chunk, u32 dtype of K, u32 1 (a ledger follows), chunk * chunks, entry * chunks
    chunk  := for each layer, K of each head, then V of each head, [chunk_tokens, head_dim] each
    entry  := u8 was resident, 3 bytes of padding, f32 score (-inf: none)

Little-endian, as its writer was on every machine it ran on. It names no model, no tokens, no RoPE, no layers, no head
dimension and no dtype of V, and holds no checksum: the caller vouches for all of these with the geometry, and a flipped
bit of the payload cannot be found. It holds no last use either, so that order is lost; all entries say 0. A chunk
of zeros from end to end was never written (the published writer fills holes so) and comes back as None.

Layout and rejections follow the description of the published `KvFlashPager::deserialize`; bytes after the ledger, a
chunk of no bytes, counts without end and a ledger that is none are refused here and were not there.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from kvlab.core.errors import SnapshotRefused, StorageError
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.paging.ledger import ChunkEntry, Ledger
from kvlab.kvstore.snapshot.format import MAX_CHUNKS, PUBLISHED_MAGIC
from kvlab.kvstore.snapshot.payload import RawChunks
from kvlab.kvstore.snapshot.reasons import Code, refusal

HEADER = struct.Struct("<8s8I")
ENTRY = struct.Struct("<B3xf")
GGML_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}  # ggml.h, enum ggml_type


@dataclass(frozen=True)
class PublishedHeader:
    """The 40 bytes at the front, in their order."""

    chunks: int
    chunk_tokens: int
    kv_heads: int
    k_segment: int
    v_segment: int
    chunk_bytes: int
    dtype: int
    has_ledger: int

    SIZE: ClassVar[int] = HEADER.size

    @property
    def ledger_at(self) -> int:
        """First byte of the ledger."""
        return self.SIZE + self.chunks * self.chunk_bytes

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return self.ledger_at + self.chunks * ENTRY.size

    @classmethod
    def read(cls, data: bytes) -> PublishedHeader:
        """The header; `SnapshotRefused` when the bytes are cut short or begin otherwise."""
        front = bytes(data[: len(PUBLISHED_MAGIC)])
        if front == PUBLISHED_MAGIC[::-1]:
            raise refusal(Code.V1_BYTE_ORDER, "the KVFLASH1 snapshot was written by a big-endian machine")
        if front != PUBLISHED_MAGIC[: len(front)]:
            raise refusal(
                Code.V1_MAGIC, f"the file begins with {front!r}, a KVFLASH1 snapshot with {PUBLISHED_MAGIC!r}"
            )
        if len(data) < cls.SIZE:
            raise refusal(Code.V1_HEADER_SHORT, f"the file has {len(data)} bytes, a KVFLASH1 header takes {cls.SIZE}")
        return cls(*HEADER.unpack_from(data)[1:])

    def refuse_others(self, geometry: Geometry) -> None:
        """`SnapshotRefused` unless the chunks are those of a geometry."""
        segment = geometry.chunk_tokens * geometry.head_dim * geometry.torch_dtype.itemsize
        expected = {
            Code.V1_CHUNK_TOKENS: ("tokens in a chunk", self.chunk_tokens, geometry.chunk_tokens),
            Code.V1_KV_HEADS: ("KV heads", self.kv_heads, geometry.kv_heads),
            Code.V1_K_SEGMENT: ("bytes of K of a head", self.k_segment, segment),
            Code.V1_V_SEGMENT: ("bytes of V of a head", self.v_segment, segment),
            Code.V1_CHUNK_BYTES: ("bytes in a chunk", self.chunk_bytes, geometry.chunk_bytes),
            Code.V1_DTYPE: ("as the ggml type of K", self.dtype, GGML_TYPES[geometry.dtype]),
            Code.V1_NO_LEDGER: ("as the mark of a ledger", self.has_ledger, 1),
        }
        for code, (what, found, needed) in expected.items():
            if found != needed:
                raise refusal(code, f"the KVFLASH1 snapshot has {found} {what}, needed is {needed}")
        if not 1 <= self.chunks <= MAX_CHUNKS:
            raise refusal(
                Code.V1_COUNT, f"the KVFLASH1 snapshot counts {self.chunks} chunks; allowed: 1 to {MAX_CHUNKS}"
            )

    def refuse_length(self, file_bytes: int) -> None:
        """`SnapshotRefused` unless a file of so many bytes is exactly what the header promises."""
        if file_bytes < self.file_bytes:
            raise refusal(
                Code.V1_TRUNCATED, f"the file has {file_bytes} of the {self.file_bytes} bytes that it promises"
            )
        if file_bytes > self.file_bytes:
            raise refusal(Code.V1_TRAILING_BYTES, f"{file_bytes - self.file_bytes} bytes follow the ledger")


@dataclass(frozen=True)
class PublishedSnapshot:
    """A KVFLASH1 snapshot whose sizes were found right.

    Parameters
    ----------
    path : Path
        The file.
    header : PublishedHeader
        Its first bytes.
    geometry : Geometry
        What the caller vouches for.
    ledger : Ledger
        Residency and scores; every last use is 0.
    """

    path: Path
    header: PublishedHeader
    geometry: Geometry
    ledger: Ledger

    def chunks(self) -> Iterator[Tensor | None]:
        """The payloads; None for a chunk that was never written. Nothing tells a damaged one."""
        coder, size = RawChunks(self.geometry), self.header.chunk_bytes
        with _opened(self.path) as file:
            file.seek(self.header.SIZE)
            for number in range(self.header.chunks):
                data = file.read(size)
                if len(data) != size:
                    raise SnapshotRefused(
                        refusal(Code.V1_TRUNCATED, "the file has shrunk since it was opened").reasons, self.path
                    )
                yield coder.decode(data, number) if data != bytes(size) else None


def read_published(path: Path | str, geometry: Geometry) -> PublishedSnapshot:
    """Open a KVFLASH1 snapshot.

    Parameters
    ----------
    path : Path
        The file.
    geometry : Geometry
        Of the cache that it was made from; what the file says must agree with it, and what it does not say (layers,
        head_dim, the dtype of V) is believed.

    Raises
    ------
    StorageError
        When the file is missing or cannot be read.
    SnapshotRefused
        When it is of another layout than `geometry`, cut short, too long, or no such snapshot.
    """
    path = Path(path)
    try:
        with _opened(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header = PublishedHeader.read(file.read(PublishedHeader.SIZE))
            header.refuse_others(geometry)
            header.refuse_length(file_bytes)
            file.seek(header.ledger_at)
            ledger = _ledger(file.read(header.chunks * ENTRY.size))
    except SnapshotRefused as error:
        raise SnapshotRefused(error.reasons, path) from None
    return PublishedSnapshot(path, header, geometry, ledger)


def _opened(path: Path):
    try:
        return path.open("rb")
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", code="storage.cannot-read") from None


def _ledger(data: bytes) -> Ledger:
    """Residency and scores; `SnapshotRefused` when one is none that the published pager writes."""
    entries = []
    for chunk, (resident, score) in enumerate(ENTRY.iter_unpack(data)):
        if resident > 1 or math.isnan(score) or score == math.inf:
            raise refusal(Code.V1_LEDGER, f"the ledger says of chunk {chunk}: resident {resident}, score {score}")
        entries.append(ChunkEntry(bool(resident), None if score == -math.inf else score, last_use=0))
    return Ledger(tuple(entries), clock=0)
