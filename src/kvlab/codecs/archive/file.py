"""An archived cache as one file: a header, a record for every block of tokens, and one digest over them all.

    file   := header, u32 token id * tokens, u32 length * blocks, record * blocks, leaf * blocks, seal
    header := magic "KVLA", u16 version, u16 layers, u16 heads, u16 head_dim, u32 tokens, u16 block, u16 quality,
              u8 dtype, u8 starts, 6 bytes recipe id, 8 bytes calibration digest, 8 bytes model hash, crc
    record := u32 length * layers, what the entropy coder wrote of each layer
    leaf   := 32 bytes, that of a record in the `tree`
    seal   := see `seal`; its root is that of the tree over what stands before the records, and the records in order

All integers are little-endian. `starts` is 1 where the first token is the first of its text. A record decodes without
the others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import google_crc32c

from kvlab.codecs.archive.codec import ArchiveBody
from kvlab.codecs.archive.steps import QUALITIES
from kvlab.codecs.stream import tree
from kvlab.codecs.stream.cache_file import DTYPES
from kvlab.codecs.stream.seal import Key, Seal
from kvlab.core import filekind
from kvlab.core.errors import StorageError, StreamError

MAGIC, VERSION = filekind.ARCHIVE, 2
PURPOSE = b"kvlab archive 2\n"  # of signatures
HEADER = struct.Struct("<4sHHHHIHHBB6s8s8s")
U32 = struct.Struct("<I")


@dataclass(frozen=True)
class ArchiveHeader:
    """What an archive is, and what it takes to decode it.

    Parameters
    ----------
    layers, heads, head_dim, tokens : int
        Shape of the cache; `heads` counts KV heads.
    block, quality : int
        See `ArchiveBody`.
    dtype : {"float32", "bfloat16", "float16"}
        Of the cache that was coded.
    starts : bool
        Whether the first token is the first of its text.
    recipe_id, calibration_hash, model_hash : str
        12, 16 and 16 hexadecimal digits; that of the calibration is of the fitted codec alone.
    """

    layers: int
    heads: int
    head_dim: int
    tokens: int
    block: int
    quality: int
    dtype: Literal["float32", "bfloat16", "float16"]
    starts: bool
    recipe_id: str
    calibration_hash: str
    model_hash: str

    SIZE: ClassVar[int] = HEADER.size + U32.size

    @property
    def blocks(self) -> int:
        """Of tokens."""
        return -(-self.tokens // self.block)

    @property
    def values(self) -> int:
        """Numbers of the whole cache, K and V."""
        return 2 * self.layers * self.heads * self.head_dim * self.tokens

    @classmethod
    def overhead(cls, layers: int, tokens: int, block: int) -> int:
        """Bytes of a file that are not what the entropy coder wrote."""
        blocks = -(-tokens // block)
        return cls.SIZE + (tokens + blocks * (1 + layers)) * U32.size + blocks * tree.SIZE + Seal.SIZE

    def pack(self) -> bytes:
        """The first bytes of the file; `StorageError` when they could not be read back."""
        shape = (self.layers, self.heads, self.head_dim, self.tokens, self.block)
        if 0 in shape:
            raise StorageError(
                f"{self} does not fit an archive's header: no size may be zero", code="storage.zero-size"
            )
        ids = (self.recipe_id, self.calibration_hash, self.model_hash)
        try:
            marks = [bytes.fromhex(text) for text in ids]
            raw = HEADER.pack(MAGIC, VERSION, *shape, self.quality, DTYPES.index(self.dtype), self.starts, *marks)
        except (struct.error, ValueError) as error:
            raise StorageError(f"{self} does not fit an archive's header: {error}", code="storage.header") from None
        return raw + U32.pack(google_crc32c.value(raw))

    @classmethod
    def unpack(cls, data: bytes) -> ArchiveHeader:
        """Read the header back; `StreamError` when it is damaged, or says what cannot be."""
        if len(data) < cls.SIZE:
            raise StreamError(f"the archive is cut short: {len(data)} bytes where its header takes {cls.SIZE}")
        raw = data[: HEADER.size]
        magic, version, *shape, quality, dtype, starts, recipe, calibration, model = HEADER.unpack(raw)
        if magic != MAGIC:
            raise StreamError(f"this is no archive: it begins with {magic!r} instead of {MAGIC!r}")
        if version != VERSION:
            raise StreamError(
                f"the archive has version {version}, this reader knows version {VERSION}; write it anew",
                code="stream.other-version",
            )
        if google_crc32c.value(raw) != U32.unpack_from(data, HEADER.size)[0]:
            raise StreamError("the checksum of the archive's header is wrong; it is damaged", code="stream.checksum")
        if 0 in shape or dtype >= len(DTYPES) or starts > 1 or quality not in QUALITIES:
            raise StreamError("the archive's header names a size, a dtype or a quality that cannot be")
        marks = (mark.hex() for mark in (recipe, calibration, model))
        return cls(*shape, quality, DTYPES[dtype], bool(starts), *marks)


class ArchiveFile(NamedTuple):
    """An archive that was read, and found whole."""

    header: ArchiveHeader
    ids: tuple[int, ...]
    body: ArchiveBody


def refuse_other(file: ArchiveFile, calibration_hash: str, model_hash: str, ids: Sequence[int] | None = None) -> None:
    """`StreamError` for an archive of another calibration, another model or, where they are given, other tokens."""
    for name, wanted in (("calibration_hash", calibration_hash), ("model_hash", model_hash)):
        if (coded := getattr(file.header, name)) != wanted:
            raise StreamError(
                f"the archive was written with {name} {coded}, given is {wanted}; decode it with the same",
                code="stream.other-identity",
            )
    if ids is not None and tuple(ids) != file.ids:
        place = next((i for i, pair in enumerate(zip(ids, file.ids, strict=False)) if pair[0] != pair[1]), "the end")
        raise StreamError(
            f"the archive is of other tokens than are given: they differ at {place}", code="stream.other-tokens"
        )


def dump(body: ArchiveBody, header: ArchiveHeader, ids: Sequence[int], key: Key | None = None) -> bytes:
    """The file of a coded cache, signed where there is a key."""
    records = [record_of(record) for record in body.records]
    front = header.pack() + struct.pack(f"<{len(ids) + len(records)}I", *ids, *map(len, records))
    leaves = [tree.leaf(front), *(tree.leaf(record) for record in records)]
    return b"".join([front, *records, *leaves[1:], Seal.of(tree.root(leaves), PURPOSE, key).pack()])


def load(data: bytes, key: Key | None = None) -> ArchiveFile:
    """What `dump` wrote, whole.

    Raises
    ------
    StreamError
        It is not exactly that, or is not signed with `key`.
    """
    header = ArchiveHeader.unpack(data)
    count, end = header.blocks, len(data) - header.blocks * tree.SIZE - Seal.SIZE
    at = header.SIZE + (header.tokens + count) * U32.size
    if end < at:
        raise StreamError(f"the archive is cut short: {len(data)} bytes")
    ids = struct.unpack_from(f"<{header.tokens}I", data, header.SIZE)
    lengths = struct.unpack_from(f"<{count}I", data, header.SIZE + header.tokens * U32.size)
    if at + sum(lengths) != end:
        raise StreamError(f"the archive's records take {sum(lengths)} bytes, and {end - at} are there")
    seal, records, leaves = Seal.unpack(data[-Seal.SIZE :]), [], [tree.leaf(data[:at])]
    for number, length in enumerate(lengths):
        record = data[at : at + length]
        leaves.append(tree.leaf(record))
        if leaves[-1] != data[end + number * tree.SIZE : end + (number + 1) * tree.SIZE]:
            raise StreamError(
                f"block {number} is not the one that was written; the archive is damaged", code="stream.part-digest"
            )
        records.append(parts_of(record, header.layers, number))
        at += length
    if tree.root(leaves) != seal.root:
        raise StreamError(
            "its header and records are not those of its digest; it is damaged, or mixed of several",
            code="stream.root-digest",
        )
    seal.refuse_other(key, PURPOSE)
    return ArchiveFile(
        header, ids, ArchiveBody(header.quality, header.tokens, header.block, header.starts, tuple(records))
    )


def record_of(parts: Sequence[bytes]) -> bytes:
    """The record of a block, of what the entropy coder wrote of each layer."""
    return struct.pack(f"<{len(parts)}I", *map(len, parts)) + b"".join(parts)


def parts_of(record: bytes, layers: int, number: int) -> tuple[bytes, ...]:
    """What was written of each layer; `StreamError` where the record of block `number` is none of so many layers."""
    at = layers * U32.size
    lengths = struct.unpack_from(f"<{layers}I", record) if len(record) >= at else ()
    if at + sum(lengths) != len(record) or len(lengths) != layers or any(n % U32.size for n in lengths):
        raise StreamError(f"block {number} is not of {layers} layers")
    parts = []
    for length in lengths:
        parts.append(record[at : at + length])
        at += length
    return tuple(parts)
