"""What is known of each chunk beside its bytes: enough to evict after a restore as if there had been none."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvlab.core.counts import counted
from kvlab.core.errors import NonFinite, ParamsError


@dataclass(frozen=True)
class ChunkEntry:
    """One chunk.

    Parameters
    ----------
    resident : bool
        Whether it lies in the pool.
    score : float or None
        What the residency policy last said of it, the higher the better; None before it said anything.
    last_use : int
        The ledger's clock when it was last asked for.

    Raises
    ------
    NonFinite
        When the score is NaN or infinite.
    ParamsError
        When `last_use` is negative.
    """

    resident: bool
    score: float | None
    last_use: int

    def __post_init__(self) -> None:
        counted("last_use", self.last_use)
        if self.score is not None and not math.isfinite(self.score):
            raise NonFinite(
                f"the score of a chunk is {self.score}; a chunk without a score has None", code="non-finite.score"
            )


UNKNOWN = ChunkEntry(resident=False, score=None, last_use=0)


@dataclass(frozen=True)
class Ledger:
    """All chunks in logical order, and the clock.

    Parameters
    ----------
    entries : tuple of ChunkEntry
    clock : int
        Counts every time a chunk was asked for; no `last_use` is above it.

    Raises
    ------
    ParamsError
        When an entry was used later than the clock says.
    """

    entries: tuple[ChunkEntry, ...]
    clock: int

    def __post_init__(self) -> None:
        counted("clock", self.clock)
        late = [chunk for chunk, entry in enumerate(self.entries) if entry.last_use > self.clock]
        if late:
            used = self.entries[late[0]].last_use
            raise ParamsError(
                f"chunk {late[0]} was last used at {used}, and the ledger's clock is at {self.clock}",
                code="params.ledger-clock",
            )

    @classmethod
    def untouched(cls, chunks: int) -> Ledger:
        """Of a run in which every chunk is in the pool, that was asked for them in order and never scored."""
        return cls(tuple(ChunkEntry(True, None, number + 1) for number in range(chunks)), chunks)

    def __len__(self) -> int:
        return len(self.entries)

    def entry(self, chunk: int) -> ChunkEntry:
        """What is known of a chunk; `UNKNOWN` after the ledger's end."""
        return self.entries[chunk] if chunk < len(self.entries) else UNKNOWN

    def upto(self, chunks: int) -> Ledger:
        """The first `chunks` entries, under the same clock."""
        return replace(self, entries=self.entries[:chunks])

    @property
    def resident(self) -> tuple[int, ...]:
        """The chunks that lie in the pool."""
        return tuple(chunk for chunk, entry in enumerate(self.entries) if entry.resident)
