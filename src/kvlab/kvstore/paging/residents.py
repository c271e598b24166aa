"""Which chunks of one sequence are in the pool: what may not leave it, what goes for others, what is pinned.

Never evicted are the first chunks (sinks), the head and the last ones before it (tail), pinned ones, and every
chunk that is still filling; so a span cannot evict its own beginning before the forward that fills it is
through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.core.counts import counted
from kvlab.core.errors import LayoutMismatch, NonFinite, PagerError, PinRefused, PoolExhausted
from kvlab.kvstore.paging.chunks import Chunks, PagingStats
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.paging.residency import Policy, worst_first


@dataclass(frozen=True)
class Moves:
    """Chunks that left the pool and chunks that came back, each in the order in which they did."""

    outs: tuple[int, ...] = ()
    ins: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.outs) + len(self.ins)


class Residents:
    """The chunks of one sequence, some of them in a pool of bounded size.

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
                f"a chunk is {geometry.chunk_tokens} tokens in the geometry and {config.chunk_tokens} in the config",
                code="layout.chunk-size",
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
    def stats(self) -> PagingStats:
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

    def protection(self, chunk: int) -> str | None:
        """Why a chunk may not leave the pool: "sink", "pin", "tail" or "filling"; None when it may."""
        return self._protection(chunk, self._head)

    # What moves

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
            raise PagerError(f"{len(scores)} scores were given for {len(self.chunks)} chunks", code="pager.score-count")
        given = {number: float(score) for number, score in enumerate(scores) if score is not None}
        if bad := [number for number, score in given.items() if not math.isfinite(score)]:
            raise NonFinite(f"the score of chunk {bad[0]} is {given[bad[0]]}", code="non-finite.score")
        for number, score in given.items():
            self.chunks[number].score = score

    def page_out(self, chunk: int) -> None:
        """A chunk leaves the pool; `PagerError` when it is absent or protected, nothing when it is out already."""
        self._known(chunk)
        if self.chunks[chunk].block is None:
            return
        if why := self.protection(chunk):
            raise PagerError(f"chunk {chunk} may not leave the pool: {why}", code="pager.protected")
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
                f"{self.config.tail_chunks} tail chunks in a pool of {self.config.blocks}",
                code="pin.too-many",
            )
        return self._pin(pins)

    def unpin_all(self) -> None:
        """No chunk is pinned; none leaves the pool by this."""
        self.pins = frozenset()

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
                "chunks may go",
                code="pool-exhausted.blocks",
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
            raise PinRefused(f"nothing is pinned while a span is being filled: {error}", code="pin.filling") from error
        for number in ins:
            self.chunks.page_in(number)
        return Moves(moves.outs, ins)

    def _known(self, chunk: int) -> None:
        if not 0 <= chunk < len(self.chunks):
            raise PagerError(
                f"there is no chunk {chunk}; {len(self.chunks)} chunks hold {self.length} tokens",
                code="pager.no-such-chunk",
            )
