"""The snapshots of a folder, and which of them holds most of a prompt."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvlab.core.errors import SnapshotRefused, StorageError
from kvlab.kvstore.snapshot import chain, read
from kvlab.kvstore.snapshot.identity import ContextIdentity, differences
from kvlab.kvstore.snapshot.numerics import COMPUTED, PREFILL
from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason
from kvlab.kvstore.vllm.miss_reasons import reasons_of

Signature = tuple[int, int, int]  # inode, time of the last change in ns, bytes


@dataclass(frozen=True)
class _Book:
    """A snapshot as it was found: what it is, or why it is nothing.

    There is no signature where the disk could not be read, so that it is looked at again the next time.
    """

    signature: Signature | None
    identity: ContextIdentity | None
    chain: tuple[bytes, ...]
    unusable: tuple[SnapshotReason, ...]
    decoded: bool = False
    lossy: bool = False


class Match(NamedTuple):
    """The snapshot that holds most of a prompt.

    Parameters
    ----------
    path : Path
    tokens : int
        Of the prompt's first ones, whole chunks.
    decoded : bool
        Whether some of its tokens may have been computed one at a time, see `kvlab.kvstore.snapshot.numerics`.
    lossy : bool
        Whether its K and V are other numbers than those that were computed.
    """

    path: Path
    tokens: int
    decoded: bool = False
    lossy: bool = False


class SnapshotIndex:
    """A folder of snapshots. Each is opened once, and again when its file has changed.

    Parameters
    ----------
    folder : Path
        Files in it that begin with a dot, and folders, are passed over. It need not be there.
    unproven : bool
        See `kvlab.kvstore.snapshot.read.Snapshot.check`.
    """

    def __init__(self, folder: Path, unproven: bool = False):
        self.folder, self.unproven, self._books, self._spoilt = folder, unproven, {}, 0

    def find(self, identity: ContextIdentity, tokens: Sequence[int]) -> tuple[Match | None, list[SnapshotReason]]:
        """The snapshot with the longest usable prefix of these tokens, and what speaks against the others.

        Parameters
        ----------
        identity : ContextIdentity
            What is needed.
        tokens : sequence of int
            Of the prompt.

        Returns
        -------
        tuple of (Match or None, list of SnapshotReason)
            Each kind of reason once.
        """
        size, best, reasons = identity.geometry.chunk_tokens, None, {}
        links = chain.links(tokens, size, identity.salt)
        for path, book in self._scanned():
            against = [*book.unusable, *(differences(book.identity, identity) if book.identity else ())]
            shared = 0 if against else chain.shared(book.chain, links) * size
            if not against and not shared:
                line = f"the first {size} tokens of the prompt are not those of {path.name}"
                against = [SnapshotReason(Code.PREFIX, line)]
            for reason in against:
                reasons.setdefault(reason.code, SnapshotReason(reason.code, f"{path.name}: {reason.message}"))
            if shared > (best.tokens if best else 0):
                best = Match(path, shared, book.decoded, book.lossy)
        return best, list(reasons.values())

    def spoil(self, path: Path, reasons: Sequence[SnapshotReason]) -> None:
        """Offer a snapshot no more that was found damaged when it was loaded, until its file is another."""
        book = self._books.get(path)
        if book is not None:
            self._books[path] = _Book(book.signature, None, (), tuple(reasons))
            self._spoilt += 1

    def state(self) -> tuple[int, ...] | None:
        """Equal while `find` would find the same, as far as the folder alone tells; None when there is no folder.

        A file that is overwritten where it lies does not show here. Whoever loads it sees that it is another.
        """
        try:
            folder = self.folder.stat()
        except OSError:
            return None
        return self._spoilt, folder.st_dev, folder.st_ino, folder.st_mtime_ns

    def _scanned(self) -> Iterator[tuple[Path, _Book]]:
        found = dict(self._files())
        self._books = {
            path: book
            if (book := self._books.get(path)) and book.signature == signature
            else _opened(path, signature, self.unproven)
            for path, signature in sorted(found.items())
        }
        yield from self._books.items()

    def _files(self) -> Iterator[tuple[Path, Signature]]:
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if not entry.name.startswith(".") and entry.is_file():
                        state = entry.stat()
                        yield Path(entry.path), (state.st_ino, state.st_mtime_ns, state.st_size)
        except OSError:  # no folder, or one that changes under our hands: whoever comes next looks again
            return


def _opened(path: Path, signature: Signature, unproven: bool) -> _Book:
    try:
        with read.open(path) as snapshot:
            manifest = snapshot.manifest
            against = () if unproven else tuple(manifest.unproven())
            decoded = manifest.made.get(COMPUTED, PREFILL) != PREFILL
            return _Book(signature, manifest.identity, snapshot.chain, against, decoded, not manifest.lossless)
    except SnapshotRefused as error:
        return _Book(signature, None, (), reasons_of(error))
    except StorageError as error:  # of the moment, it may be: too many open files, or a disk that did not answer
        return _Book(None, None, (), reasons_of(error))
