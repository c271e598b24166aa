"""What two snapshots have in common, and every way in which they differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvlab.kvstore.snapshot.identity import differences
from kvlab.kvstore.snapshot.read import Snapshot
from kvlab.kvstore.snapshot.reasons import SnapshotReason


@dataclass(frozen=True)
class ChunkDifference:
    """How the stored bytes of one chunk differ.

    Parameters
    ----------
    number : int
    bits : int or None
        That differ; None where one has more bytes than the other, or they are stored in different ways.
    of_bits : int
        That the first one has.
    """

    number: int
    bits: int | None
    of_bits: int


@dataclass(frozen=True)
class SnapshotComparison:
    """The second snapshot held against the first.

    Parameters
    ----------
    identity : tuple of SnapshotReason
        What keeps either from being used for the other.
    lengths : tuple of int
        Tokens of each.
    shared_tokens : int
        Equal tokens from the first on, whole chunks or not.
    compared_chunks : int
        Chunks that were compared: those that hold the same tokens in both.
    chunks : tuple of ChunkDifference
        Those among them whose bytes differ.
    ledger : tuple of int
        Those among them that the ledgers say different things of.
    notes : tuple of str
        Fields of the manifests that differ and decide nothing: what wrote them, the evidence, the clock.
    """

    identity: tuple[SnapshotReason, ...]
    lengths: tuple[int, int]
    shared_tokens: int
    compared_chunks: int
    chunks: tuple[ChunkDifference, ...]
    ledger: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether they are the same context in the same bytes, with the same ledger; notes do not count."""
        whole = self.lengths[0] == self.lengths[1] == self.shared_tokens
        return whole and not (self.identity or self.chunks or self.ledger)


def compare(first: Snapshot, second: Snapshot) -> SnapshotComparison:
    """Hold a snapshot against another, chunk by chunk.

    Chunks are compared as far as the tokens are the same and the chunks as long. Of payloads that are coded
    otherwise only the identity is compared, for their bytes mean different things.

    Raises
    ------
    SnapshotRefused
        A chunk is damaged; what it differs in would mean nothing.
    """
    tokens = _shared_tokens(first, second)
    size = first.geometry.chunk_tokens
    common = tokens // size if size == second.geometry.chunk_tokens else 0
    return SnapshotComparison(
        identity=tuple(differences(first.manifest.identity, second.manifest.identity)),
        lengths=(first.length, second.length),
        shared_tokens=tokens,
        compared_chunks=common,
        chunks=tuple(_chunks(first, second, common)),
        ledger=tuple(n for n in range(common) if first.records[n].entry != second.records[n].entry),
        notes=tuple(_notes(first, second)),
    )


def _shared_tokens(first: Snapshot, second: Snapshot) -> int:
    """Equal ids from the first on, whatever the chunks and the salt."""
    pairs = zip(first.tokens, second.tokens, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(first.length, second.length))


def _chunks(first: Snapshot, second: Snapshot, count: int) -> Iterator[ChunkDifference]:
    one, two = first.manifest.identity, second.manifest.identity
    comparable = (one.geometry, one.codec) == (two.geometry, two.codec)
    for number in range(count):
        mine, other = first.stored(number), second.stored(number)
        if not comparable or len(mine) != len(other):
            yield ChunkDifference(number, None, 8 * len(mine))
        elif mine != other:
            yield ChunkDifference(number, _bits(mine, other), 8 * len(mine))


def _bits(mine: bytes, other: bytes) -> int:
    different = np.frombuffer(mine, np.uint8) ^ np.frombuffer(other, np.uint8)
    return int(np.bitwise_count(different).sum())


def _notes(first: Snapshot, second: Snapshot) -> Iterator[str]:
    one, other = first.manifest, second.manifest
    for name in sorted(one.made.keys() | other.made.keys()):
        if one.made.get(name) != other.made.get(name):
            yield f"made with {name} {one.made.get(name)} and {other.made.get(name)}"
    for name in ("evidence", "clock"):
        if getattr(one, name) != getattr(other, name):
            yield f"{name} {_listed(getattr(one, name))} and {_listed(getattr(other, name))}"


def _listed(value: object) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple) else str(value)
