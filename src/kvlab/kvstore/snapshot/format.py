"""Format v3 of a snapshot, byte by byte.

All integers are little-endian, and floats IEEE 754.

    file     := header, manifest, index, tokens, payload, seal
    header   := magic "KVLABSNP", u16 version, u16 bytes of the header, u32 bytes of the manifest, u32 chunks,
                u32 chunk_tokens, u64 bytes of the payload, u32 crc of the manifest, u32 crc of the index,
                u32 crc of the tokens, u32 crc of the header up to here
    manifest := canonical JSON, see `manifest`
    index    := record * chunks
    record   := 32 bytes link of the token chain, 32 bytes digest of the chunk, u64 bytes of the chunk in the payload,
                u64 last use, f64 score, u32 flags (1: resident, 2: has a score)
    tokens   := u32 * (chunks * chunk_tokens)
    payload  := the chunks one after the other, see `payload`
    seal     := see `kvlab.codecs.stream.seal`

Every crc is CRC-32C and finds accidents, all of them in one reading. What belongs together is said by a tree of
SHA-256 (`kvlab.codecs.stream.tree`):

    digest of a chunk := SHA-256(0x00 || "kvlab snapshot chunk 3\n" || SHA-256(identity) || link || bytes of the chunk)
    root in the seal  := SHA-256(0x00 || header || manifest || index || tokens)

with the identity in canonical JSON, as the manifest has it. The root binds the index, and so every chunk in its place.
A chunk's digest names the model, the way of coding and all tokens up to it: K and V of one context, digests and all, do
not pass for those of another.

What the header promises is held against the length of the file before anything else is read
or allocated; no later read goes beyond it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import google_crc32c

from kvlab.codecs.stream import tree
from kvlab.codecs.stream.seal import Seal
from kvlab.core import filekind
from kvlab.core.errors import UserError
from kvlab.kvstore.paging.ledger import ChunkEntry
from kvlab.kvstore.snapshot.reasons import Code, refusal

MAGIC, VERSION = filekind.SNAPSHOT, 3
PURPOSE = b"kvlab snapshot 3\n"  # of signatures
CHUNK = b"kvlab snapshot chunk 3\n"
PUBLISHED_MAGIC = filekind.PUBLISHED  # see `v1`
HEADER = struct.Struct("<8sHHIIIQIII")
RECORD = struct.Struct("<32s32sQQdI")
U32 = struct.Struct("<I")
RESIDENT, SCORED = 1, 2
MAX_CHUNKS = 1 << 24
MAX_CHUNK_TOKENS = 1 << 16
MAX_MANIFEST = 1 << 20  # bytes; a recipe takes less than a thousand


@dataclass(frozen=True)
class SnapshotHeader:
    """The first bytes of a snapshot: what follows, and the checksums of all that is neither payload nor seal."""

    manifest_bytes: int
    chunks: int
    chunk_tokens: int
    payload_bytes: int
    manifest_crc: int
    index_crc: int
    tokens_crc: int

    SIZE: ClassVar[int] = HEADER.size + U32.size

    @property
    def length(self) -> int:
        """Tokens."""
        return self.chunks * self.chunk_tokens

    @property
    def spans(self) -> tuple[slice, slice, slice]:
        """Where manifest, index and tokens lie in the file."""
        ends = [self.SIZE]
        for size in (self.manifest_bytes, self.chunks * RECORD.size, self.length * U32.size):
            ends.append(ends[-1] + size)
        return slice(*ends[0:2]), slice(*ends[1:3]), slice(*ends[2:4])

    @property
    def payload_at(self) -> int:
        """First byte of the payload."""
        return self.spans[-1].stop

    @property
    def digest_at(self) -> int:
        """First byte after the payload, where the seal with the digest of the whole begins."""
        return self.payload_at + self.payload_bytes

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return self.digest_at + Seal.SIZE

    def pack(self) -> bytes:
        """The bytes of the header; `UserError` when a number does not fit its field."""
        sizes = (self.manifest_bytes, self.chunks, self.chunk_tokens, self.payload_bytes)
        crcs = (self.manifest_crc, self.index_crc, self.tokens_crc)
        try:
            raw = HEADER.pack(MAGIC, VERSION, self.SIZE, *sizes, *crcs)
        except struct.error as error:
            raise UserError(f"{self} does not fit a snapshot's header: {error}", code="user.too-large") from None
        return raw + U32.pack(google_crc32c.value(raw))

    @classmethod
    def read(cls, data: bytes) -> SnapshotHeader:
        """The header at the front of a file, which may be shorter than a header.

        Raises
        ------
        SnapshotRefused
            When it is none, is of another version, is damaged, or counts what cannot be.
        """
        refuse_strangers(data)
        if len(data) < cls.SIZE:
            raise refusal(Code.HEADER_SHORT, f"the file is {len(data)} bytes long, its header alone takes {cls.SIZE}")
        raw = bytes(data[: HEADER.size])
        _, version, size, *numbers = HEADER.unpack(raw)
        if version != VERSION:
            raise refusal(
                Code.UNKNOWN_VERSION,
                f"the snapshot has version {version}, this reader knows version {VERSION}; save it anew",
            )
        if U32.unpack_from(data, HEADER.size)[0] != google_crc32c.value(raw):
            raise refusal(Code.HEADER_CHECKSUM, "the checksum of the header is wrong; the snapshot is damaged")
        header = cls(*numbers)
        header.refuse_impossible(size)
        return header

    def refuse_impossible(self, size: int) -> None:
        """`SnapshotRefused` when right checksums vouch for what no writer writes."""
        limits = {
            "bytes of the header": (size, self.SIZE, self.SIZE),
            "bytes of the manifest": (self.manifest_bytes, 1, MAX_MANIFEST),
            "chunks": (self.chunks, 1, MAX_CHUNKS),
            "tokens of a chunk": (self.chunk_tokens, 1, MAX_CHUNK_TOKENS),
        }
        for what, (given, least, most) in limits.items():
            if not least <= given <= most:
                raise refusal(Code.HEADER_COUNTS, f"the header counts {given} {what}; allowed: {least} to {most}")

    def refuse_length(self, file_bytes: int) -> None:
        """`SnapshotRefused` unless a file of so many bytes is exactly what the header promises."""
        if file_bytes < self.file_bytes:
            raise refusal(Code.TRUNCATED, f"the file has {file_bytes} bytes of the {self.file_bytes} that it promises")
        if file_bytes > self.file_bytes:
            raise refusal(Code.TRAILING_BYTES, f"{file_bytes - self.file_bytes} bytes follow the end of the snapshot")


def refuse_strangers(data: bytes) -> None:
    """`SnapshotRefused` when a file does not begin as a snapshot does."""
    front = bytes(data[: len(MAGIC)])
    if front == PUBLISHED_MAGIC:
        raise refusal(
            Code.PUBLISHED_LAYOUT, "this is a KVFLASH1 snapshot, which names no model and no tokens; read it with `v1`"
        )
    if front != MAGIC[: len(front)]:
        kind = filekind.kind_of(bytes(data[: filekind.FRONT]))
        other = f"this is {kind}, and no snapshot: it" if kind else "the file"
        raise refusal(Code.NOT_A_SNAPSHOT, f"{other} begins with {front!r}, a snapshot with {MAGIC!r}")


class Record(NamedTuple):
    """What the index says of one chunk.

    Parameters
    ----------
    link : bytes
        The chunk's link of the token chain, 32 bytes.
    digest : bytes
        `chunk_digest` of its bytes in the payload.
    nbytes : int
        Length of these.
    entry : ChunkEntry
        What the ledger knew of it.
    """

    link: bytes
    digest: bytes
    nbytes: int
    entry: ChunkEntry

    def pack(self) -> bytes:
        """The bytes of the record; `UserError` when a number does not fit its field."""
        entry = self.entry
        score = 0.0 if entry.score is None else entry.score
        flags = (RESIDENT if entry.resident else 0) | (0 if entry.score is None else SCORED)
        try:
            return RECORD.pack(self.link, self.digest, self.nbytes, entry.last_use, score, flags)
        except struct.error as error:
            raise UserError(f"{entry} does not fit the index of a snapshot: {error}", code="user.too-large") from None


def read_index(data: bytes | memoryview, clock: int) -> Iterator[Record]:
    """The records of an index whose checksum was right; `SnapshotRefused` where one is impossible all the same.

    Parameters
    ----------
    data : bytes or memoryview
        The whole section.
    clock : int
        The ledger's; no chunk was used after it.
    """
    for number, fields in enumerate(RECORD.iter_unpack(data)):
        link, digest, nbytes, last_use, score, flags = fields
        scored = bool(flags & SCORED)
        if flags & ~(RESIDENT | SCORED) or not math.isfinite(score) or (score and not scored) or last_use > clock:
            raise refusal(
                Code.INDEX_INVALID,
                f"the index says of chunk {number}: flags {flags:#x}, score {score}, last use {last_use} of {clock}",
            )
        yield Record(link, digest, nbytes, ChunkEntry(bool(flags & RESIDENT), score if scored else None, last_use))


def chunk_digest(identity: bytes, link: bytes, data: bytes) -> bytes:
    """What binds a chunk's bytes to the context that they are of, 32 bytes.

    Parameters
    ----------
    identity : bytes
        `Identity.fingerprint`, 32 bytes.
    link : bytes
        The chunk's, 32 bytes.
    data : bytes
        Its bytes in the payload.
    """
    return tree.leaf(CHUNK, identity, link, data)
