"""A KV cache of any length in a pool of bounded size.

A chunk is *absent*, then *filling* (in the pool, not all rows written in all layers), then *sealed*: it never
changes again, and may be *paged* to host memory and *recalled*, bit for bit. Rows that were not written are
nowhere: they are not gathered, and not part of a payload.

What may leave the pool, and what goes for others, stands in `residents`. What attention reads lies in logical order,
so that it cannot depend on which block holds what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kvlab.core.counts import counted
from kvlab.core.errors import LayoutMismatch, PagerError, PoolExhausted, UnknownName
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.paging.ledger import ChunkEntry, Ledger
from kvlab.kvstore.paging.pool import Gathered
from kvlab.kvstore.paging.residency import Policy, staying
from kvlab.kvstore.paging.residents import Residents

ORDERS: dict[str, Callable[[tuple[int, int]], int]] = {
    "logical": lambda placed: placed[0],
    "slot": lambda placed: placed[1],  # as the blocks lie: for the study of the noise that this makes
}


class Pager(Residents):
    """K and V of one sequence, all layers: rows are appended, written by layer and gathered.

    Parameters, attributes and what is raised: see `Residents`.
    """

    # What there is

    @property
    def room(self) -> int:
        """The most tokens that `alloc_span` takes now; from 1 whenever all rows are written."""
        chunks = len(self.chunks) + len(self.chunks.pool.free) + len(self._loose(self.sealed))
        return chunks * self.geometry.chunk_tokens - self.length

    def ledger(self, chunks: int | None = None) -> Ledger:
        """What is known of the first chunks, all of them when None.

        Parameters
        ----------
        chunks : int or None
            With a number, residency is as it would be had the cache ended there: its tail is resident. A snapshot
            of the sealed chunks takes ``ledger(sealed)``, and a restore of it has this very ledger.
        """
        last = len(self.chunks) if chunks is None else min(chunks, len(self.chunks))
        entries = [self.chunks.entry(number) for number in range(last)]
        stays = staying(self.config, entries)
        return Ledger(
            tuple(ChunkEntry(number in stays, entry.score, entry.last_use) for number, entry in enumerate(entries)),
            self.chunks.clock,
        )

    def payload(self, chunk: int) -> Tensor:
        """A copy of a sealed chunk's bits [layers, 2, kv_heads, chunk_tokens, head_dim] on the CPU.

        Raises
        ------
        PagerError
            When the chunk is absent or still filling.
        """
        self._known(chunk)
        if chunk >= self.sealed:
            raise PagerError(
                f"chunk {chunk} is still filling; the first {self.sealed} chunks are sealed", code="pager.not-sealed"
            )
        return self.chunks.payload(chunk)

    def rows(self, layer: int, chunks: int) -> Tensor:
        """A copy of one layer's K and V of the first sealed chunks, [2, kv_heads, tokens, head_dim] on the CPU.

        Raises
        ------
        PagerError
            When there is no such layer, or one of the chunks is absent or still filling.
        """
        self._check_layer(layer)
        if chunks > self.sealed:
            raise PagerError(
                f"{chunks} chunks are not there yet; the first {self.sealed} chunks are sealed", code="pager.not-sealed"
            )
        return torch.cat([self.chunks.rows(number, layer) for number in range(chunks)], dim=2)

    # Appending and reading

    def alloc_span(self, start: int, n: int) -> None:
        """Places for the next tokens, all or none; what has to go for them is paged out.

        Parameters
        ----------
        start : int
            Position of the first one, which is `length`.
        n : int
            How many, from 1.

        Raises
        ------
        PagerError
            When `start` is not the next position.
        PoolExhausted
            When they are more than `room`.
        """
        counted("n", n, least=1)
        if start != self.length:
            raise PagerError(
                f"tokens are appended one after the other: the next one is {self.length}, not {start}",
                code="pager.not-next",
            )
        first, head = start // self.geometry.chunk_tokens, (start + n - 1) // self.geometry.chunk_tokens
        blocks = head + 1 - len(self.chunks)
        if blocks > len(self.chunks.pool.free) and n > self.room:
            pool = self.config.pool_tokens
            raise PoolExhausted(
                f"{n} tokens have no place: at most {self.room} can follow now, in a pool of {pool}",
                code="pool-exhausted.span",
            )
        self._free(blocks, head)
        while len(self.chunks) <= head:
            self.chunks.begin()
        for chunk in range(first, head + 1):
            self.chunks.touch(chunk)
        self.length += n

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Rows of one layer, at places that `alloc_span` made.

        Parameters
        ----------
        layer : int
        start : int
            Position of the first row: the next that this layer has not got.
        k, v : Tensor
            [kv_heads, n, head_dim] in the geometry's dtype; K after the rotary embedding.

        Raises
        ------
        LayoutMismatch
            When K or V is of another shape or dtype.
        PagerError
            When a row is before `start`, after `length`, or written already.
        """
        self._check_write(layer, start, k, v)
        size, end = self.geometry.chunk_tokens, start + k.shape[1]
        for chunk in range(start // size, self.geometry.chunks(end)):
            lo, hi = max(start, chunk * size), min(end, (chunk + 1) * size)
            rows = slice(lo - start, hi - start)
            self.chunks.pool.write(self.chunks[chunk].block, layer, lo - chunk * size, k[:, rows], v[:, rows])
        self._written[layer] = end

    def gather(self, layer: int, order: str = "logical") -> Gathered:
        """The rows that this layer has in the pool.

        Parameters
        ----------
        layer : int
        order : {"logical", "slot"}
            By position; or as the blocks lie, which only the study of that noise should ask for.

        Returns
        -------
        Gathered
            Every row of a resident chunk that this layer has written, all below `length`.
        """
        self._check_layer(layer)
        if order not in ORDERS:
            raise UnknownName("order", order, ORDERS)
        end = self._written[layer]
        return self.chunks.pool.gather(layer, self._placed(end, order), end)

    def columns(self, order: str = "logical") -> Tensor:
        """Positions of the rows that `gather` gives of a layer as soon as all places are written.

        Parameters
        ----------
        order : {"logical", "slot"}
            See `gather`.

        Returns
        -------
        Tensor
            int64 [rows]: what the columns of an attention mask stand for, before a forward has begun.
        """
        if order not in ORDERS:
            raise UnknownName("order", order, ORDERS)
        return self.chunks.pool.positions(self._placed(self.length, order), self.length)[0]

    # A pager from a snapshot

    @classmethod
    def restored(
        cls,
        geometry: Geometry,
        config: PagerConfig,
        policy: Policy,
        payloads: Iterable[Tensor],
        ledger: Ledger,
        length: int,
        device: str = "cpu",
        *,
        block_order: Sequence[int] | None = None,
    ) -> Pager:
        """A new pager that holds these chunks; whoever has one swaps it in when this has succeeded.

        In the pool lie the chunks that the ledger calls resident, and the sinks and the tail. Where these are more
        than the pool has blocks, the protected ones stay, then those of the highest score, then those used last.
        Pins are not part of a ledger and have to be set again.

        Parameters
        ----------
        geometry, config, policy, device, block_order
            See the class.
        payloads : iterable of Tensor
            Of each chunk in logical order, taken one by one and copied.
        ledger : Ledger
            Longer ones are cut; of a chunk after the end of a shorter one nothing is known.
        length : int
            Tokens, a multiple of the chunk.

        Raises
        ------
        LayoutMismatch
            When a payload does not fit the geometry, or they are not as many as `length` says.
        """
        pager = cls(geometry, config, policy, device, block_order=block_order)
        if geometry.floor(counted("length", length)) != length:
            raise LayoutMismatch(
                f"{length} tokens are no whole number of chunks of {geometry.chunk_tokens}", code="layout.partial-chunk"
            )
        entries = [ledger.entry(number) for number in range(length // geometry.chunk_tokens)]
        pager._admit(payloads, entries)
        pager.length, pager._written, pager.chunks.clock = length, [length] * geometry.layers, ledger.clock
        return pager

    def check(self) -> list[str]:
        """The invariants that do not hold; empty unless there is a bug, or something else wrote here."""
        broken = self.chunks.check()
        if len(self.chunks) != self.geometry.chunks(self.length):
            broken.append(f"{len(self.chunks)} chunks for {self.length} tokens")
        if max(self._written) > self.length:
            broken.append("a layer has rows after the last token")
        if sum(chunk >= self.config.sink_chunks for chunk in self.pins) > self.config.pinnable:
            broken.append("the pins leave nothing to turn over")
        return broken + [fault for number in range(len(self.chunks)) for fault in self._check_chunk(number)]

    # Inside

    def _admit(self, payloads: Iterable[Tensor], entries: Sequence[ChunkEntry]) -> None:
        stays, number = staying(self.config, entries), -1
        for number, payload in enumerate(payloads):
            if number == len(entries):
                raise LayoutMismatch(
                    f"there are more payloads than the {len(entries)} chunks that the length says",
                    code="layout.payload-count",
                )
            self.chunks.admit(payload, entries[number], number in stays)
        if number + 1 < len(entries):
            raise LayoutMismatch(
                f"there are {number + 1} payloads for {len(entries)} chunks", code="layout.payload-count"
            )

    def _placed(self, end: int, order: str) -> list[tuple[int, int]]:
        """(chunk, block) of each resident chunk that begins below a position."""
        below = range(self.geometry.chunks(end))
        placed = [(number, block) for number in below if (block := self.chunks[number].block) is not None]
        return sorted(placed, key=ORDERS[order])

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.geometry.layers:
            raise PagerError(
                f"there is no layer {layer}; {self.geometry.layers} layers are paged", code="pager.no-such-layer"
            )

    def _check_write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        self._check_layer(layer)
        self.geometry.check_rows(k)
        self.geometry.check_rows(v)
        if k.shape != v.shape:
            raise LayoutMismatch(f"K has {k.shape[1]} rows, V has {v.shape[1]}", code="layout.k-and-v")
        if start != self._written[layer]:
            raise PagerError(
                f"the next row of layer {layer} is {self._written[layer]}, not {start}", code="pager.not-next"
            )
        if start + k.shape[1] > self.length:
            raise PagerError(
                f"rows {start} to {start + k.shape[1]} have no place yet; `alloc_span` made {self.length}",
                code="pager.no-place",
            )

    def _check_chunk(self, number: int) -> list[str]:
        chunk, why, faults = self.chunks[number], self.protection(number), []
        if why and chunk.block is None:
            faults.append(f"chunk {number} is not in the pool, where it has to be: {why}")
        if number >= self.sealed and chunk.host is not None:
            faults.append(f"chunk {number} is still filling, and in host memory")
        return faults
