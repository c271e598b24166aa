"""A KV cache of any length in a pool of bounded size.

A chunk is *absent*, then *filling* (in the pool, not all rows written in all layers), then *sealed*: it never
changes again, and may be *paged* to host memory and *recalled*, bit for bit. Rows that were not written are
nowhere: they are not gathered, and not part of a payload.

Never evicted are the first chunks (sinks), the head and the last ones before it (tail), pinned ones, and every
chunk that is still filling; so a span cannot evict its own beginning before the forward that fills it is
through. What attention reads lies in logical order, so that it cannot depend on which block holds what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvlab.errors import LayoutMismatch, NonFinite, PagerError, PinRefused, PoolExhausted, UnknownName
from kvlab.kvstore.paging.chunks import Chunks, Stats
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.counts import counted
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.paging.ledger import Entry, Ledger
from kvlab.kvstore.paging.pool import Gathered
from kvlab.kvstore.paging.residency import Policy, staying, worst_first

ORDERS: dict[str, Callable[[tuple[int, int]], int]] = {
    "logical": lambda placed: placed[0],
    "slot": lambda placed: placed[1],  # as the blocks lie: for the study of the noise that this makes
}


@dataclass(frozen=True)
class Moves:
    """Chunks that left the pool and chunks that came back, each in the order in which they did."""

    outs: tuple[int, ...] = ()
    ins: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.outs) + len(self.ins)


class Pager:
    """K and V of one sequence, all layers.

    Parameters
    ----------
    geometry : Geometry
    config : PagerConfig
    policy : Policy
        See `residency`.
    device : str
        Of the pool.
    block_order : sequence of int or None
        In which order blocks are handed out at first; changes where chunks lie, and nothing else.

    Attributes
    ----------
    length : int
        Tokens that have a place.
    pins : frozenset of int
        Pinned chunks, those to come included.

    Raises
    ------
    LayoutMismatch
        When geometry and config differ in the size of a chunk.
    """

    def __init__(
        self,
        geometry: Geometry,
        config: PagerConfig,
        policy: Policy,
        device: str = "cpu",
        *,
        block_order: Sequence[int] | None = None,
    ):
        if geometry.chunk_tokens != config.chunk_tokens:
            raise LayoutMismatch(
                f"a chunk is {geometry.chunk_tokens} tokens in the geometry and {config.chunk_tokens} in the config"
            )
        self.geometry, self.config, self.policy = geometry, config, policy
        self.chunks = Chunks(geometry, config.blocks, device, block_order)
        self.length = 0
        self.pins: frozenset[int] = frozenset()
        self._written = [0] * geometry.layers

    # What there is

    @property
    def epoch(self) -> int:
        """One more whenever a chunk enters or leaves the pool; what was derived from residency holds until then."""
        return self.chunks.epoch

    @property
    def stats(self) -> Stats:
        """What paging has cost so far."""
        return self.chunks.stats

    @property
    def resident(self) -> tuple[int, ...]:
        """The chunks in the pool, in logical order."""
        return tuple(self.chunks.resident)

    @property
    def sealed(self) -> int:
        """Chunks, from the first one on, of which all rows are written in all layers."""
        return min(self._written) // self.geometry.chunk_tokens

    @property
    def room(self) -> int:
        """The most tokens that `alloc_span` takes now; from 1 whenever all rows are written."""
        chunks = len(self.chunks) + len(self.chunks.pool.free) + len(self._loose(self.sealed))
        return chunks * self.geometry.chunk_tokens - self.length

    def protection(self, chunk: int) -> str | None:
        """Why a chunk may not leave the pool: "sink", "pin", "tail" or "filling"; None when it may."""
        return self._protection(chunk, self._head)

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
            tuple(Entry(number in stays, entry.score, entry.last_use) for number, entry in enumerate(entries)),
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
            raise PagerError(f"chunk {chunk} is still filling; the first {self.sealed} chunks are sealed")
        return self.chunks.payload(chunk)

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
            raise PagerError(f"tokens are appended one behind the other: the next one is {self.length}, not {start}")
        first, head = start // self.geometry.chunk_tokens, (start + n - 1) // self.geometry.chunk_tokens
        blocks = head + 1 - len(self.chunks)
        if blocks > len(self.chunks.pool.free) and n > self.room:
            pool = self.config.pool_tokens
            raise PoolExhausted(f"{n} tokens have no place: at most {self.room} can follow now, in a pool of {pool}")
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
            [kv_heads, n, head_dim] in the geometry's dtype; K behind the rotary embedding.

        Raises
        ------
        LayoutMismatch
            When K or V is of another shape or dtype.
        PagerError
            When a row is in front of `start`, behind `length`, or written already.
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

    # Who is in the pool

    def set_scores(self, scores: Sequence[float | None]) -> None:
        """What the policy says of the first chunks, into the ledger; None leaves one as it is.

        Raises
        ------
        PagerError
            When there are more scores than chunks.
        NonFinite
            When a score is NaN or infinite.
        """
        if len(scores) > len(self.chunks):
            raise PagerError(f"{len(scores)} scores were given for {len(self.chunks)} chunks")
        given = {number: float(score) for number, score in enumerate(scores) if score is not None}
        if bad := [number for number, score in given.items() if not math.isfinite(score)]:
            raise NonFinite(f"the score of chunk {bad[0]} is {given[bad[0]]}")
        for number, score in given.items():
            self.chunks[number].score = score

    def page_out(self, chunk: int) -> None:
        """A chunk leaves the pool; `PagerError` when it is absent or protected, nothing when it is out already."""
        self._known(chunk)
        if self.chunks[chunk].block is None:
            return
        if why := self.protection(chunk):
            raise PagerError(f"chunk {chunk} may not leave the pool: {why}")
        self.chunks.page_out(chunk)

    def page_in(self, chunk: int) -> None:
        """A chunk is asked for, and comes back into the pool if it is out; another may have to go.

        Raises
        ------
        PagerError
            When the chunk is absent.
        PoolExhausted
            When none may go.
        """
        self._known(chunk)
        if self.chunks[chunk].block is None:
            self._free(1, self._head)
            self.chunks.page_in(chunk)
        self.chunks.touch(chunk)

    def reselect(self) -> Moves:
        """Fill the pool anew: what is protected, then the chunks that the policy ranks highest."""
        everything = range(len(self.chunks))
        loose = [number for number in everything if self.protection(number) is None]
        space = self.config.blocks - (len(everything) - len(loose))
        going = set(worst_first(self.policy, self.chunks.entries(loose))[: max(0, len(loose) - space)])
        outs = tuple(number for number in self.chunks.resident if number in going)
        ins = tuple(number for number in loose if number not in going and self.chunks[number].block is None)
        for number in outs:
            self.chunks.page_out(number)
        for number in ins:
            self.chunks.page_in(number)
        return Moves(outs, ins)

    def pin(self, lo: int, hi: int) -> Moves:
        """Keep the chunks of positions [lo, hi) in the pool, those to come included; all of them or none.

        Parameters
        ----------
        lo, hi : int
            Tokens; an empty or inverted range pins nothing.

        Returns
        -------
        Moves
            What came back into the pool, and what went for it.

        Raises
        ------
        PinRefused
            When the pool would have less than the head and one chunk to turn over, or a span that is being filled
            leaves no block for them.
        """
        size = self.geometry.chunk_tokens
        first, last = counted("lo", lo) // size, (counted("hi", hi) - 1) // size
        if lo >= hi:
            return Moves()
        sinks, most = self.config.sink_chunks, self.config.pinnable
        new = last + 1 - max(first, sinks)  # counted before they are listed: `hi` may be anything
        pins = self.pins | set(range(first, last + 1)) if new <= most else None
        if pins is None or sum(chunk >= sinks for chunk in pins) > most:
            raise PinRefused(
                f"positions {lo} to {hi} are not pinned: {most} chunks may be pinned beside {sinks} sink and "
                f"{self.config.tail_chunks} tail chunks in a pool of {self.config.blocks}"
            )
        return self._pin(pins)

    def unpin_all(self) -> None:
        """No chunk is pinned; none leaves the pool by this."""
        self.pins = frozenset()

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
            Longer ones are cut; of a chunk behind the end of a shorter one nothing is known.
        length : int
            Tokens, a multiple of the chunk.

        Raises
        ------
        LayoutMismatch
            When a payload does not fit the geometry, or they are not as many as `length` says.
        """
        pager = cls(geometry, config, policy, device, block_order=block_order)
        if geometry.floor(counted("length", length)) != length:
            raise LayoutMismatch(f"{length} tokens are no whole number of chunks of {geometry.chunk_tokens}")
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
            broken.append("a layer has rows behind the last token")
        if sum(chunk >= self.config.sink_chunks for chunk in self.pins) > self.config.pinnable:
            broken.append("the pins leave nothing to turn over")
        return broken + [fault for number in range(len(self.chunks)) for fault in self._check_chunk(number)]

    # Inside

    @property
    def _head(self) -> int:
        return len(self.chunks) - 1

    def _protection(self, chunk: int, head: int) -> str | None:
        """`protection`, had the cache this head."""
        if chunk < self.config.sink_chunks:
            return "sink"
        if chunk in self.pins:
            return "pin"
        if chunk >= self.sealed:
            return "filling"
        return "tail" if chunk >= min(self.sealed, head) - self.config.tail_chunks else None

    def _loose(self, head: int) -> list[int]:
        """Resident chunks that may go, had the cache this head."""
        return [number for number in self.chunks.resident if self._protection(number, head) is None]

    def _free(self, blocks: int, head: int) -> Moves:
        """At least so many free blocks, or `PoolExhausted` with nothing moved."""
        missing = blocks - len(self.chunks.pool.free)
        if missing <= 0:
            return Moves()
        loose = self._loose(head)
        if missing > len(loose):
            raise PoolExhausted(
                f"{blocks} blocks are needed: {blocks - missing} of {self.config.blocks} are free, and {len(loose)} "
                "chunks may go"
            )
        victims = worst_first(self.policy, self.chunks.entries(loose))[:missing]
        for victim in victims:
            self.chunks.page_out(victim)
        return Moves(outs=tuple(victims))

    def _pin(self, pins: frozenset[int]) -> Moves:
        before, self.pins = self.pins, pins
        ins = tuple(sorted(n for n in pins if n < len(self.chunks) and self.chunks[n].block is None))
        try:
            moves = self._free(len(ins), self._head)
        except PoolExhausted as error:
            self.pins = before
            raise PinRefused(f"nothing is pinned while a span is being filled: {error}") from error
        for number in ins:
            self.chunks.page_in(number)
        return Moves(moves.outs, ins)

    def _admit(self, payloads: Iterable[Tensor], entries: Sequence[Entry]) -> None:
        stays, number = staying(self.config, entries), -1
        for number, payload in enumerate(payloads):
            if number == len(entries):
                raise LayoutMismatch(f"there are more payloads than the {len(entries)} chunks that the length says")
            self.chunks.admit(payload, entries[number], number in stays)
        if number + 1 < len(entries):
            raise LayoutMismatch(f"there are {number + 1} payloads for {len(entries)} chunks")

    def _placed(self, end: int, order: str) -> list[tuple[int, int]]:
        """(chunk, block) of each resident chunk that begins below a position."""
        below = range(self.geometry.chunks(end))
        placed = [(number, block) for number in below if (block := self.chunks[number].block) is not None]
        return sorted(placed, key=ORDERS[order])

    def _known(self, chunk: int) -> None:
        if not 0 <= chunk < len(self.chunks):
            raise PagerError(f"there is no chunk {chunk}; {len(self.chunks)} chunks hold {self.length} tokens")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.geometry.layers:
            raise PagerError(f"there is no layer {layer}; {self.geometry.layers} layers are paged")

    def _check_write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        self._check_layer(layer)
        self.geometry.check_rows(k)
        self.geometry.check_rows(v)
        if k.shape != v.shape:
            raise LayoutMismatch(f"K has {k.shape[1]} rows, V has {v.shape[1]}")
        if start != self._written[layer]:
            raise PagerError(f"the next row of layer {layer} is {self._written[layer]}, not {start}")
        if start + k.shape[1] > self.length:
            raise PagerError(f"rows {start} to {start + k.shape[1]} have no place yet; `alloc_span` made {self.length}")

    def _check_chunk(self, number: int) -> list[str]:
        chunk, why, faults = self.chunks[number], self.protection(number), []
        if why and chunk.block is None:
            faults.append(f"chunk {number} is not in the pool, where it has to be: {why}")
        if number >= self.sealed and chunk.host is not None:
            faults.append(f"chunk {number} is still filling, and in host memory")
        return faults
