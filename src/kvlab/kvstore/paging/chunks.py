"""Where the bits of each chunk are: in a block of the pool, in host memory, or in both. Nothing here decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvlab.kvstore.paging.geometry import Geometry, same_bits
from kvlab.kvstore.paging.ledger import ChunkEntry
from kvlab.kvstore.paging.pool import BlockPool


@dataclass
class Chunk:
    """One chunk, somewhere.

    Attributes
    ----------
    block : int or None
        Its block of the pool while it is resident.
    host : Tensor or None
        Its payload. One that was recalled keeps it, and leaves again without being copied.
    score, last_use
        See `ledger.ChunkEntry`.
    """

    block: int | None = None
    host: Tensor | None = None
    score: float | None = None
    last_use: int = 0


@dataclass(frozen=True)
class PagingStats:
    """What paging has cost so far.

    Attributes
    ----------
    page_outs, page_ins : int
        Chunks that left the pool, and that came back into it.
    host_bytes : int
        Held in host memory now.
    moved_bytes : int
        Copied between the pool and host memory, both ways.
    """

    page_outs: int
    page_ins: int
    host_bytes: int
    moved_bytes: int


class Chunks:
    """All chunks of a cache in logical order, and the pool.

    Parameters
    ----------
    geometry : Geometry
    blocks : int
        Chunks that the pool holds.
    device : str
    order : sequence of int or None
        See `BlockPool`.

    Attributes
    ----------
    epoch : int
        One more whenever a chunk enters or leaves the pool.
    clock : int
        One more whenever a chunk is asked for.
    """

    def __init__(self, geometry: Geometry, blocks: int, device: str, order: Sequence[int] | None = None):
        self.geometry, self.pool = geometry, BlockPool(geometry, blocks, device, order)
        self.items: list[Chunk] = []
        self.epoch = self.clock = self.page_outs = self.page_ins = self.moved_bytes = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, chunk: int) -> Chunk:
        return self.items[chunk]

    @property
    def resident(self) -> list[int]:
        """The chunks in the pool, in logical order."""
        return [number for number, chunk in enumerate(self.items) if chunk.block is not None]

    @property
    def stats(self) -> PagingStats:
        """See `PagingStats`."""
        hosted = sum(chunk.host is not None for chunk in self.items)
        return PagingStats(self.page_outs, self.page_ins, hosted * self.geometry.chunk_bytes, self.moved_bytes)

    def entry(self, number: int) -> ChunkEntry:
        """What the ledger says of a chunk."""
        chunk = self.items[number]
        return ChunkEntry(chunk.block is not None, chunk.score, chunk.last_use)

    def entries(self, numbers: Sequence[int]) -> list[tuple[int, ChunkEntry]]:
        """The same of several, each after its number."""
        return [(number, self.entry(number)) for number in numbers]

    def touch(self, number: int) -> None:
        """A chunk is asked for."""
        self.clock += 1
        self.items[number].last_use = self.clock

    def begin(self) -> None:
        """A new last chunk, in a block of its own that nothing was written to."""
        self.items.append(Chunk(block=self.pool.take()))
        self.epoch += 1

    def admit(self, payload: Tensor, entry: ChunkEntry, resident: bool) -> None:
        """A new last chunk with these bits, which are copied; into the pool, or else into host memory."""
        self.geometry.check_payload(payload)
        chunk = Chunk(score=entry.score, last_use=entry.last_use)
        if resident:
            chunk.block = self.pool.take()
            self.pool.load(chunk.block, payload)
        else:
            chunk.host = payload.clone()
        self.items.append(chunk)
        self.epoch += 1

    def page_out(self, number: int) -> None:
        """A resident chunk leaves the pool; its bits are copied unless host memory has them."""
        chunk = self.items[number]
        if chunk.host is None:
            chunk.host = self.pool.payload(chunk.block)
            self.moved_bytes += self.geometry.chunk_bytes
        self.pool.give(chunk.block)
        chunk.block = None
        self.page_outs += 1
        self.epoch += 1

    def page_in(self, number: int) -> None:
        """A chunk comes back into a free block."""
        chunk = self.items[number]
        chunk.block = self.pool.take()
        self.pool.load(chunk.block, chunk.host)
        self.moved_bytes += self.geometry.chunk_bytes
        self.page_ins += 1
        self.epoch += 1

    def payload(self, number: int) -> Tensor:
        """A copy of a chunk's bits on the CPU, from wherever they are."""
        chunk = self.items[number]
        return self.pool.payload(chunk.block) if chunk.host is None else chunk.host.clone()

    def rows(self, number: int, layer: int) -> Tensor:
        """One layer of a chunk [2, kv_heads, chunk_tokens, head_dim] on the CPU, to be read and not changed."""
        chunk = self.items[number]
        return (self.pool.data[chunk.block] if chunk.host is None else chunk.host)[layer].cpu()

    def check(self) -> list[str]:
        """The invariants that do not hold."""
        held = [chunk.block for chunk in self.items if chunk.block is not None]
        broken = []
        if len(set(held)) < len(held):
            broken.append("two chunks share a block")
        if sorted([*held, *self.pool.free]) != list(range(self.pool.blocks)):
            broken.append("the free blocks and those of resident chunks are not all blocks, each once")
        if any(chunk.last_use > self.clock for chunk in self.items):
            broken.append("a chunk was used later than the clock says")
        return broken + [fault for number in range(len(self)) for fault in self._check_bits(number)]

    def _check_bits(self, number: int) -> list[str]:
        chunk = self.items[number]
        if chunk.host is None:
            return [] if chunk.block is not None else [f"chunk {number} is nowhere"]
        if chunk.block is not None and not same_bits(chunk.host, self.pool.payload(chunk.block)):
            return [f"chunk {number} differs between the pool and host memory"]
        return []
