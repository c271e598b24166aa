"""How large the pool is, and what never leaves it."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.core.counts import counted
from kvlab.core.errors import ParamsError, PoolTooSmall


@dataclass(frozen=True)
class PagerConfig:
    """Size of the pool, and what never leaves it.

    Parameters
    ----------
    pool_tokens : int
        A multiple of `chunk_tokens`, and room for at least two chunks beside the sinks and the tail: the head, and
        one that can go.
    chunk_tokens : int
        As in the geometry.
    sink_chunks, tail_chunks : int
        First chunks, and chunks before the head.

    Raises
    ------
    ParamsError
        When one is not a whole number, or the pool is no multiple of a chunk.
    PoolTooSmall
        When the pool is below `floor_tokens`.
    """

    pool_tokens: int
    chunk_tokens: int = 64
    sink_chunks: int = 1
    tail_chunks: int = 4

    def __post_init__(self) -> None:
        counted("chunk_tokens", self.chunk_tokens, least=1)
        for name in ("pool_tokens", "sink_chunks", "tail_chunks"):
            counted(name, getattr(self, name))
        if self.pool_tokens % self.chunk_tokens:
            raise ParamsError(
                f"pool_tokens is {self.pool_tokens}, no multiple of the chunk's {self.chunk_tokens}",
                code="params.partial-chunk",
            )
        if self.pool_tokens < self.floor_tokens:
            raise PoolTooSmall(
                f"pool_tokens is {self.pool_tokens}; {self.sink_chunks} sink and {self.tail_chunks} tail chunks, the "
                f"head and one that can go need {self.floor_tokens}"
            )

    @property
    def blocks(self) -> int:
        """Chunks that the pool holds."""
        return self.pool_tokens // self.chunk_tokens

    @property
    def floor_tokens(self) -> int:
        """The smallest pool that never deadlocks."""
        return (self.sink_chunks + self.tail_chunks + 2) * self.chunk_tokens

    @property
    def pinnable(self) -> int:
        """Chunks that may be pinned, sinks not counted."""
        return self.blocks - self.floor_tokens // self.chunk_tokens
