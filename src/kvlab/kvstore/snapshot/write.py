"""Saving a snapshot: written beside its place, made durable, and put there in one step.

Whatever happens on the way, whoever opens the path finds the old snapshot or the new one. One chunk is in memory at a
time, or where a coder goes by layers two layers and the coded file. Equal content, saved by equal packages on equal
machines, gives equal bytes: the manifest names those, and nothing in the file says when it was written.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain as joined
from itertools import repeat
from pathlib import Path
from typing import BinaryIO

import google_crc32c
from torch import Tensor

from kvlab.codecs.stream import tree
from kvlab.codecs.stream.seal import Key, Seal
from kvlab.core import parent_watch
from kvlab.core.errors import StorageError, UserError
from kvlab.core.records import storage_error, versions
from kvlab.kvstore.paging.ledger import Ledger
from kvlab.kvstore.snapshot.archive import Rows
from kvlab.kvstore.snapshot.chain import links, token_bytes
from kvlab.kvstore.snapshot.format import PURPOSE, Record, SnapshotHeader, chunk_digest
from kvlab.kvstore.snapshot.identity import ContextIdentity
from kvlab.kvstore.snapshot.manifest import Manifest, build
from kvlab.kvstore.snapshot.payload import ChunkCoder, RawChunks


@dataclass(frozen=True)
class SnapshotSource:
    """What there is to save.

    Parameters
    ----------
    identity : ContextIdentity
        Whose context it is; its codec counts for nothing, the coder's does.
    payloads : iterable of Tensor or None
        The context's chunks from the first on, at least those that are saved; None for one that was never written.
    ledger : Ledger
        What is known of them; entries after the saved ones are left out.
    tokens : sequence of int
        The context's ids, whole chunks or not.
    rows : callable, optional
        K and V of a layer of the saved tokens, [2, kv_heads, tokens, head_dim]: for a coder that goes by layers, so
        that it need not hold all payloads.
    """

    identity: ContextIdentity
    payloads: Iterable[Tensor | None]
    ledger: Ledger
    tokens: Sequence[int]
    rows: Rows | None = None


@dataclass(frozen=True)
class Saved:
    """A snapshot that was written.

    Parameters
    ----------
    path : Path
        Where.
    manifest : Manifest
        What it says of itself.
    nbytes, payload_bytes : int
        Of the file, and of the K and V in it.
    digest : str
        Of the whole, see `format`: the root in the seal, 64 hexadecimal digits.
    """

    path: Path
    manifest: Manifest
    nbytes: int
    payload_bytes: int
    digest: str


def save(
    path: Path | str,
    source: SnapshotSource,
    *,
    upto: int | None = None,
    coder: ChunkCoder | None = None,
    evidence: Sequence[str] = (),
    made: Mapping[str, str] | None = None,
    key: Key | None = None,
) -> Saved:
    """Write the whole chunks of a context's first tokens.

    Parameters
    ----------
    path : Path
        The file; replaced in one step when there is one.
    source : SnapshotSource
        What to save.
    upto : int, optional
        How many tokens, all when left out; a chunk that they do not fill is left out.
    coder : ChunkCoder, optional
        How K and V are stored; as they are when left out.
    evidence : sequence of str
        Ids of the gate's evidence of what a lossy coder costs.
    made : mapping, optional
        What the caller adds to the versions of the packages in the manifest: the engine, the attention.
    key : Key, optional
        Sign with it.

    Raises
    ------
    UserError
        The tokens do not fill one chunk, there are fewer than `upto`, one is no id, or a chunk is missing.
    LayoutMismatch
        A payload is not of the identity's geometry.
    StorageError
        The disk is full or the folder cannot be written; what was there is still there.
    """
    path, geometry = Path(path), source.identity.geometry
    coder = RawChunks(geometry) if coder is None else coder
    length = geometry.floor(_length(source.tokens, upto))
    if not length:
        raise UserError(
            f"{_length(source.tokens, upto)} tokens do not fill one chunk of {geometry.chunk_tokens};"
            " a snapshot of them would restore nothing and was not written",
            code="user.too-few-tokens",
        )
    manifest = build(
        identity=source.identity.coded(coder.codec),
        length=length,
        clock=source.ledger.clock,
        evidence=tuple(evidence),
        made=versions() | dict(made or {}),
    )
    with placed(path) as file:
        saved = _written(file, path, manifest, source, coder, key)
    _sync_folder(path)
    return saved


def _length(tokens: Sequence[int], upto: int | None) -> int:
    """The tokens that are asked for."""
    if upto is None:
        return len(tokens)
    if not 0 <= upto <= len(tokens):
        raise UserError(f"{upto} tokens cannot be saved; the context has {len(tokens)}", code="user.too-many-tokens")
    return upto


def _written(
    file: BinaryIO, path: Path, manifest: Manifest, source: SnapshotSource, coder: ChunkCoder, key: Key | None
) -> Saved:
    """The payload first, for its length and digests show only then; then what stands before it; then the seal."""
    geometry, said = manifest.identity.geometry, manifest.pack()
    tokens = source.tokens[: manifest.length]
    chain = links(tokens, geometry.chunk_tokens, manifest.identity.salt)
    ids = token_bytes(tokens)
    blank = SnapshotHeader(len(said), len(chain), geometry.chunk_tokens, 0, 0, 0, 0)
    file.seek(blank.payload_at)
    identity, records = manifest.identity.fingerprint, []
    coded = coder.encoded(_whole(source.payloads, len(chain)), tokens, source.rows)
    for number, data in zip(range(len(chain)), coded, strict=True):
        _put(file, data)
        digest = chunk_digest(identity, chain[number], data)
        records.append(Record(chain[number], digest, len(data), source.ledger.entry(number)))
    index = b"".join(record.pack() for record in records)
    payload_bytes = sum(record.nbytes for record in records)
    names = ("manifest_crc", "index_crc", "tokens_crc")
    crcs = dict(zip(names, map(google_crc32c.value, (said, index, ids)), strict=True))
    header = replace(blank, payload_bytes=payload_bytes, **crcs)
    front = (header.pack(), said, index, ids)
    file.seek(0)
    for section in front:
        _put(file, section)
    seal = Seal.of(tree.leaf(*front), PURPOSE, key)
    file.seek(header.digest_at)
    _put(file, seal.pack())
    return Saved(path, manifest, header.file_bytes, payload_bytes, seal.root.hex())


def _whole(payloads: Iterable[Tensor | None], chunks: int) -> Iterator[Tensor]:
    """Each chunk; a hole is refused, for zeros in its place would be read as K and V."""
    found = zip(range(chunks), joined(payloads, repeat(None)), strict=False)
    for number, payload in found:
        if payload is None:
            raise UserError(
                f"chunk {number} of the {chunks} to be saved was never written; save the tokens before it",
                code="user.unwritten-chunk",
            )
        yield payload


def _put(file: BinaryIO, data: bytes) -> None:
    """Every byte of a snapshot goes through here."""
    file.write(data)


def _sync_folder(path: Path) -> None:
    """Make the new name durable; the file is in place already, whole, and stays there if this fails.

    Raises
    ------
    StorageError
        When the disk cannot promise it. A file system that knows no such promise is no error.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise StorageError(
                f"{path} is in place and whole, but the disk does not promise to keep it: {error.strerror}; save again",
                code="storage.not-durable",
            ) from error


# Putting a file in its place in one step, whoever else is putting one there.

RANDOM_BYTES = 8
ABANDONED_S = 24 * 60 * 60  # seconds without a change


@contextmanager
def placed(path: Path) -> Iterator[BinaryIO]:
    """An empty file beside `path`, open for reading and writing; on success durable, and then at `path`.

    Raises
    ------
    StorageError
        When the disk is full or the folder cannot be written; `path` is left as it was.
    RunGone
        When the run that started this job is over; `path` is left as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(RANDOM_BYTES)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        parent_watch.check()
        os.replace(temporary, path)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove what writers of `path` left when they were killed, once it is old."""
    name = f".{glob.escape(path.name)}.{'[0-9a-f]' * 2 * RANDOM_BYTES}.tmp"
    for left in path.parent.glob(name):
        with suppress(OSError):  # somebody else has taken it away
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                left.unlink()
