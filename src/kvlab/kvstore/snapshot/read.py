"""Opening a snapshot: what it is, whether it may be used here, and its chunks, none of them unchecked.

`open` looks at everything but the payload: header, length, manifest, index, tokens, their digest in the seal, a
signature where there is a key, and the token chain. Chunks are then handed out one by one, each after its own digest,
which the index holds and the seal binds, so that a long context passes through little memory, and a prefix is known to
belong to the whole without the rest. The last chunk that was asked for is handed out after the rest of the file has
been found right too: whoever has them all has them from an undamaged file. A reader builds something new from them and
puts it in place when it has the last one, as `Pager.restored` does; what was there before is then untouched by a
snapshot that is refused.

An open snapshot stays the one that was opened: a file that is put in its place is another.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import google_crc32c
from torch import Tensor

from kvlab.codecs.stream import tree
from kvlab.codecs.stream.seal import Key, Seal
from kvlab.core.errors import SnapshotRefused, StorageError, StreamError, UserError
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.paging.ledger import Ledger
from kvlab.kvstore.snapshot import chain
from kvlab.kvstore.snapshot.format import PURPOSE, Record, SnapshotHeader, chunk_digest, read_index
from kvlab.kvstore.snapshot.identity import ContextIdentity, differences
from kvlab.kvstore.snapshot.manifest import Manifest, read_manifest
from kvlab.kvstore.snapshot.payload import ChunkCoder, RawChunks
from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason, refusal


def open(path: Path | str, key: Key | None = None) -> Snapshot:
    """Open a snapshot and check everything but its payload.

    Parameters
    ----------
    path : Path
        The file.
    key : Key, optional
        Refuse one that was not signed with it.

    Raises
    ------
    StorageError
        When the file is missing or cannot be read.
    SnapshotRefused
        When it is damaged, no snapshot, of another version, or not signed with `key`.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise StorageError(f"cannot read {path}: it is no file", code="storage.no-file")
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", code="storage.cannot-read") from None
    try:
        return Snapshot(path, file, key)
    except SnapshotRefused as error:
        file.close()
        raise SnapshotRefused(error.reasons, path) from None
    except BaseException:
        file.close()
        raise


class Snapshot:
    """An open snapshot; use it in a ``with`` block, or `close` it.

    Parameters
    ----------
    path : Path
        Its name, for messages.
    file : BinaryIO
        Unbuffered and open for reading.
    key : Key, optional
        See `open`.

    Attributes
    ----------
    header : SnapshotHeader
    seal : Seal
        Digest of the whole, and its signature.
    manifest : Manifest
    records : tuple of Record
        The index.
    tokens : array of int
        Ids of the `length` tokens.
    nbytes : int
        Of the file.
    """

    def __init__(self, path: Path, file: BinaryIO, key: Key | None = None):
        self.path, self._file = path, file
        self.nbytes = os.fstat(file.fileno()).st_size
        first = self._read(0, min(SnapshotHeader.SIZE, self.nbytes))
        self.header = SnapshotHeader.read(first)
        self.header.refuse_length(self.nbytes)
        front = first + self._read(SnapshotHeader.SIZE, self.header.payload_at - SnapshotHeader.SIZE)
        said, index, ids = (front[span] for span in self.header.spans)
        _refuse_damage(self.header, said, index, ids)
        self.seal = _sealed(self._read(self.header.digest_at, Seal.SIZE), front, key)
        self.manifest: Manifest = read_manifest(said)
        self.records: tuple[Record, ...] = tuple(read_index(index, self.manifest.clock))
        self.tokens = chain.read_tokens(ids)
        _refuse_contradictions(self)
        self._identity = self.manifest.identity.fingerprint
        self._places = tuple(accumulate((r.nbytes for r in self.records), initial=self.header.payload_at))

    @property
    def geometry(self) -> Geometry:
        """Layout and dtype of the chunks."""
        return self.manifest.identity.geometry

    @property
    def length(self) -> int:
        """Tokens, a multiple of a chunk's."""
        return self.manifest.length

    @property
    def ledger(self) -> Ledger:
        """What was known of each chunk when it was saved."""
        return Ledger(tuple(record.entry for record in self.records), self.manifest.clock)

    @property
    def chain(self) -> tuple[bytes, ...]:
        """The chunks' links, see `chain`."""
        return tuple(record.link for record in self.records)

    @property
    def digest(self) -> str:
        """Of the whole, see `format`; 64 hexadecimal digits."""
        return self.seal.root.hex()

    def usable_prefix(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt, whole chunks from the first on, this snapshot holds."""
        size = self.geometry.chunk_tokens
        theirs = chain.links(tokens[: self.length], size, self.manifest.identity.salt)
        return chain.shared(self.chain, theirs) * size

    def check(
        self, expected: ContextIdentity, tokens: Sequence[int] | None = None, *, unproven: bool = False
    ) -> list[SnapshotReason]:
        """Everything that speaks against using this snapshot here; empty when nothing does.

        Parameters
        ----------
        expected : ContextIdentity
            What is needed. Its codec is that of the coder that will read the payload, None for raw.
        tokens : sequence of int, optional
            The prompt; one that shares no chunk with the snapshot is a reason.
        unproven : bool
            Let a lossy payload pass that names no evidence of what it costs: for measuring just that.
        """
        reasons = differences(self.manifest.identity, expected)
        reasons += [] if unproven else self.manifest.unproven()
        if tokens is not None and not self.usable_prefix(tokens):
            line = f"the first {self.geometry.chunk_tokens} tokens of the prompt are not the snapshot's; none is reused"
            reasons.append(SnapshotReason(Code.PREFIX, line))
        return reasons

    def chunks(
        self, upto: int | None = None, coder: ChunkCoder | None = None, *, whole: bool = True
    ) -> Iterator[Tensor]:
        """Payloads from the first on, each after its digest was found right.

        Parameters
        ----------
        upto : int, optional
            Tokens; the chunks that they fill. All when left out.
        coder : ChunkCoder, optional
            For a coded payload, see `payload.coder_for`.
        whole : bool
            Read the file to its end and check all of it before the last of these chunks is handed out. Without it a
            short prefix of a long file is read alone.

        Raises
        ------
        UserError
            `upto` is beyond the snapshot, or the coder is not the payload's.
        SnapshotRefused
            In place of the first damaged chunk, or of the last one when a later one of the file is damaged.
        """
        coder = self._fitting(coder)
        return self._streamed(self._count(upto), coder, whole)

    def load(self, upto: int | None = None, coder: ChunkCoder | None = None) -> tuple[Tensor, ...]:
        """The payloads of `chunks`, once the whole file has been found right."""
        return tuple(self.chunks(upto, coder))

    def stored(self, number: int) -> bytes:
        """A chunk's bytes as they lie in the file; `SnapshotRefused` unless their digest is right."""
        record = self.records[number]
        data = self._read(self._places[number], record.nbytes)
        if chunk_digest(self._identity, record.link, data) != record.digest:
            line = f"chunk {number} is not the one that was saved; the snapshot is damaged, or mixed of several"
            raise SnapshotRefused([SnapshotReason(Code.CHUNK_CHECKSUM, line)], self.path)
        return data

    def verify(self, coder: ChunkCoder | None = None) -> list[SnapshotReason]:
        """Read everything and name every damage, not the first alone; empty when the file is what was written.

        Parameters
        ----------
        coder : ChunkCoder, optional
            Also decode each chunk.
        """
        coder = None if coder is None else self._fitting(coder)
        return [reason for number in range(len(self.records)) for reason in self._wrong(number, coder)]

    def close(self) -> None:
        """Let the file go; what was read stays."""
        self._file.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _count(self, upto: int | None) -> int:
        """The chunks that so many tokens fill."""
        if upto is None:
            return len(self.records)
        if not 0 <= upto <= self.length:
            raise UserError(
                f"{upto} tokens cannot be read; {self.path} holds {self.length}", code="user.too-many-tokens"
            )
        return upto // self.geometry.chunk_tokens

    def _fitting(self, coder: ChunkCoder | None) -> ChunkCoder:
        coder = RawChunks(self.geometry) if coder is None else coder
        needed = self.manifest.identity
        reasons = differences(needed, needed.coded(coder.codec))
        if reasons:
            raise SnapshotRefused(reasons, self.path)
        return coder

    def _streamed(self, count: int, coder: ChunkCoder, whole: bool) -> Iterator[Tensor]:
        for number in range(count):
            chunk = self._decoded(number, self.stored(number), coder)
            if whole and number == count - 1:
                for later in range(count, len(self.records)):
                    self.stored(later)
            yield chunk

    def _wrong(self, number: int, coder: ChunkCoder | None) -> Sequence[SnapshotReason]:
        """What is wrong with a chunk: its bytes, or that a coder, if there is one, cannot read them."""
        try:
            data = self.stored(number)
            if coder is not None:
                self._decoded(number, data, coder)
        except SnapshotRefused as error:
            return error.reasons
        return ()

    def _decoded(self, number: int, data: bytes, coder: ChunkCoder) -> Tensor:
        size = self.geometry.chunk_tokens
        try:
            return coder.decode(data, number, self.tokens[number * size : (number + 1) * size])
        except StreamError as error:
            line = f"chunk {number} is not what its codec writes: {error}"
            raise SnapshotRefused([SnapshotReason(Code.CHUNK_UNDECODABLE, line)], self.path) from None

    def _read(self, at: int, size: int) -> bytes:
        """So many bytes from a place on, which were there when the snapshot was opened."""
        parts, left = [], size
        try:
            while left and (part := os.pread(self._file.fileno(), left, at + size - left)):
                parts.append(part)
                left -= len(part)
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}", code="storage.cannot-read") from None
        if left:
            line = f"the file ends {left} bytes before it should; it has shrunk since it was opened"
            raise SnapshotRefused([SnapshotReason(Code.TRUNCATED, line)], self.path)
        return b"".join(parts)


def _refuse_damage(header: SnapshotHeader, said: bytes, index: bytes, ids: bytes) -> None:
    """`SnapshotRefused` unless every section before the payload has its checksum."""
    sections = (
        (said, header.manifest_crc, Code.MANIFEST_CHECKSUM, "manifest"),
        (index, header.index_crc, Code.INDEX_CHECKSUM, "index"),
        (ids, header.tokens_crc, Code.TOKENS_CHECKSUM, "tokens"),
    )
    reasons = [
        SnapshotReason(code, f"the checksum of the {what} is wrong; the snapshot is damaged")
        for data, crc, code, what in sections
        if google_crc32c.value(data) != crc
    ]
    if reasons:
        raise SnapshotRefused(reasons)


def _sealed(data: bytes, front: bytes, key: Key | None) -> Seal:
    """The seal of a file with this front; `SnapshotRefused` unless it is its own, and signed with the key, if any."""
    try:
        seal = Seal.unpack(data)
    except StreamError as error:
        raise refusal(Code.FILE_HASH, f"{error}; the snapshot is damaged") from None
    if tree.leaf(front) != seal.root:
        line = "header, manifest, index and tokens are not those of its digest; it is damaged, or mixed of several"
        raise refusal(Code.FILE_HASH, line)
    if key is not None and not seal.signed:
        raise refusal(Code.UNSIGNED, "the snapshot is not signed")
    if key is not None and not seal.signed_by(key, PURPOSE):
        raise refusal(Code.SIGNATURE, "the snapshot is signed with another key")
    return seal


def _refuse_contradictions(snapshot: Snapshot) -> None:
    """`SnapshotRefused` when sections with right checksums contradict one another."""
    header, manifest, geometry = snapshot.header, snapshot.manifest, snapshot.geometry
    sizes = {record.nbytes for record in snapshot.records}
    said = {
        "tokens of a chunk": (header.chunk_tokens, geometry.chunk_tokens),
        "tokens": (header.length, manifest.length),
        "bytes of the payload": (header.payload_bytes, sum(record.nbytes for record in snapshot.records)),
        "bytes of a chunk": (sizes, {geometry.chunk_bytes} if manifest.identity.codec is None else sizes),
    }
    for what, (one, other) in said.items():
        if one != other:
            raise refusal(Code.INCONSISTENT, f"the snapshot contradicts itself about the {what}: {one} and {other}")
    if chain.links(snapshot.tokens, geometry.chunk_tokens, manifest.identity.salt) != snapshot.chain:
        raise refusal(Code.CHAIN_BROKEN, "the token chain is not that of the tokens")
