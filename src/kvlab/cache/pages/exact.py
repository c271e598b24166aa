"""Recent tokens and sinks beside coded pages: each running request's newest and first tokens as they were computed.

The query at position p reads the key at t as it was computed where p - t < `recent`, or t < `sink`, and coded
otherwise. What a request took from the prefix cache is coded for all who share it: of the first h tokens, h those that
it took when it was admitted, all are read coded, and no sink is left. So what is read is a matter of positions alone,
and neither of how a prompt was cut nor of who else is in the step. Every token is in its page too, coded from its exact
value when it came, so that pages are complete whenever they are shared or given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlab.cache.pages.attention import Attended, compiled, of_block, softmax_over
from kvlab.cache.pages.step import ExactBlock, ExactChunk, ExactStep, ServerStep, blocks, numbered
from kvlab.codecs.shared.exact_tokens import ExactTokens as Ends
from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.core.recipe import PAGES_EXACT, Recipe

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def kept_exact(recipe: Recipe, path: str) -> tuple[int, int]:
    """A recipe's `sink` and `recent`, as pages keep them.

    Raises
    ------
    CapabilityError
        K and V name others, they are more than pages keep, or tokens of an incomplete block are to be kept.
    """
    kept = {stream: Ends.of(getattr(recipe, stream)) for stream in ("k", "v")}
    for stream, own in kept.items():
        if own.block:
            raise CapabilityError(
                f"{path}: stream {stream} has ragged: exact, and coded pages have no blocks that wait to be complete;"
                " give ragged: coded",
                code="capability.ends",
            )
        for name, most in PAGES_EXACT.items():
            if not 0 <= getattr(own, name) <= most:
                raise CapabilityError(
                    f"{path}: {name} of stream {stream} is {getattr(own, name)}; allowed in coded pages: 0 to {most}",
                    code="capability.ends",
                )
    if kept["k"] != kept["v"]:
        said = ", ".join(f"stream {stream} has sink {own.sink}, recent {own.recent}" for stream, own in kept.items())
        raise CapabilityError(
            f"{path}: {said}; coded pages keep K and V of the same tokens exact: give both the same",
            code="capability.ends",
        )
    return kept["k"].sink, kept["k"].recent


class RequestPlace(NamedTuple):
    """What a running request has: its row of the store, and how many tokens it took from the prefix cache."""

    row: int
    taken: int

    def first(self, sink: int, length: int) -> int:
        """Where the coded tokens of its `length` tokens begin."""
        return 0 if self.taken else min(sink, length)


class Ring(NamedTuple):
    """Where a sequence's exact tokens lie: its first ones, and after them its last ones in a ring.

    Parameters
    ----------
    sink, recent : int
        How many of each, the token itself included.
    """

    sink: int
    recent: int

    @property
    def tokens(self) -> int:
        """Places of a sequence."""
        return self.sink + self.recent

    def place(self, position: Tensor | NDArray) -> Tensor | NDArray:
        """Where recent tokens at these positions lie."""
        return self.sink + position % max(1, self.recent)

    def beside(self, step: ServerStep, rows: NDArray, first: NDArray, until: NDArray) -> ServerStep:
        """A step with what its queries read exact, each its sequence's tokens up to itself that it does not read coded.

        Parameters
        ----------
        rows : array
            Where each sequence's tokens are kept, int64 [sequences].
        first : array
            The position at which its coded tokens begin, int64 [sequences].
        until : array
            The position at which those of each query end, int64 [tokens].
        """
        counts, position = np.diff(step.starts), step.positions.numpy()
        of, length = numbered(counts)[0], np.array(step.lengths, np.int64)
        sinks, recents = position < first[of], position >= length[of] - self.recent
        sources = np.concatenate([np.flatnonzero(sinks), np.flatnonzero(recents)])
        places = np.concatenate([position[sinks], self.place(position[recents])])

        single = np.array(step.starts[:-1], np.int64)[counts == 1]
        last, at = position[single][:, None], np.arange(self.tokens)
        newest = last - (last + self.sink - at) % max(1, self.recent)  # of the tokens that this place of the ring had
        as_sink = (at < first[of[single]][:, None]) & (at <= last)
        seen = np.where(at < self.sink, as_sink, newest >= until[single][:, None])
        found = sources, rows[of[sources]], places, single, rows[of[single]], seen
        until = torch.from_numpy(until)
        several = np.flatnonzero(counts > 1)
        chunks = [self.chunk(step, row, int(rows[row]), int(first[row]), until) for row in several.tolist()]
        exact = ExactStep(*map(torch.from_numpy, found), tuple(chunks))
        return replace(step, first=tuple(first.tolist()), until=until, exact=exact)

    def chunk(self, step: ServerStep, row: int, kept: int, sinks: int, until: Tensor) -> ExactChunk:
        """What a sequence's several queries read exact; see `beside`."""
        start, stop, length = *step.starts[row : row + 2], step.lengths[row]
        begin = length - (stop - start)  # of its tokens, those before the step
        band = min(int(until[start]), length)  # where the recent tokens begin of which some query sees one
        found = []
        for queries in blocks(start, stop):
            last = begin + queries.stop - start
            low = min(int(until[queries.start]), last)
            own_sinks, recents = slice(min(sinks, last)), slice(sinks + low - band, sinks + last - band)
            keys = torch.cat([torch.arange(own_sinks.stop), torch.arange(low, last)])
            if len(keys):  # the kernel cannot be asked for attention over no keys
                own = queries, own_sinks, recents, keys, step.positions[queries], until[queries]
                found.append(ExactBlock(*own))
        return ExactChunk(
            row=kept,
            queries=slice(start, stop),
            sinks=torch.arange(min(sinks, begin)),
            own_sinks=max(0, sinks - begin),
            recents=self.place(torch.arange(band, max(band, begin))),
            own_recents=max(0, band - begin),
            blocks=tuple(found),
        )


class ExactStore:
    """Exact K and V of all running requests, all layers, by request.

    Memory that no request has used yet is not resident.

    Parameters
    ----------
    sink, recent : int
        How many first and last tokens of a request, the token itself included.
    requests : int
        That run at once, at most.
    layers, kv_heads, head_dim : int
        Of the model.
    dtype : torch.dtype
        That it computes in.
    """

    def __init__(
        self, sink: int, recent: int, requests: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ):
        self.ring, self.requests = Ring(sink, recent), requests
        shape = (layers, 2, requests, kv_heads, self.ring.tokens, head_dim)
        self.bytes_per_request = layers * 2 * self.ring.tokens * kv_heads * head_dim * dtype.itemsize
        # numpy's zeros are given by the system when they are first written to, torch's at once
        memory = np.zeros(self.nbytes, dtype=np.uint8)
        self.values = torch.from_numpy(memory).view(dtype).view(shape)
        self._free = list(range(requests))[::-1]
        self._places: dict[str, RequestPlace] = {}
        self.running: Callable[[], Sequence[str]] = list  # names of a step's requests, as vLLM's runner orders them

    @property
    def sink(self) -> int:
        """First tokens of a request."""
        return self.ring.sink

    @property
    def recent(self) -> int:
        """Last ones."""
        return self.ring.recent

    @property
    def nbytes(self) -> int:
        """Of all requests."""
        return self.requests * self.bytes_per_request

    def follow(self, scheduled: SchedulerOutput) -> None:
        """Give places to the requests that a step of vLLM admits, and take back those of requests that left.

        Raises
        ------
        CodecNotActive
            More requests run than there are places for.
        """
        for name in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            if name in self._places:
                self._free.append(self._places.pop(name).row)
        for new in scheduled.scheduled_new_reqs:
            self._admit(new.req_id, new.num_computed_tokens)
        running = scheduled.scheduled_cached_reqs
        for name, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
            if name in running.resumed_req_ids:
                self._admit(name, computed)

    def _admit(self, name: str, taken: int) -> None:
        if not self._free and name not in self._places:
            raise CodecNotActive(
                f"request {name} has no place for its exact tokens: {self.requests} requests have theirs, all that"
                " vLLM said would run at once (max_num_seqs)",
                code="not-active.exact-tokens",
            )
        row = self._places[name].row if name in self._places else self._free.pop()
        self._places[name] = RequestPlace(row, taken)

    def coded(self, scheduled: SchedulerOutput) -> int:
        """Tokens that a step has to read coded, over all its sequences."""
        running = scheduled.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        computed |= dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
        return sum(
            max(place.taken, length - self.recent, first := place.first(self.sink, length)) - first
            for place, length in (
                (self._places[name], computed[name] + count) for name, count in scheduled.num_scheduled_tokens.items()
            )
        )

    def beside(self, step: ServerStep, names: Sequence[str]) -> ServerStep:
        """A step whose sequences are of these requests, with what is read exact.

        Raises
        ------
        CodecNotActive
            A sequence is of a request that no step admitted.
        """
        unknown = [name for name in names if name not in self._places]
        if unknown or len(names) != len(step.lengths):
            raise CodecNotActive(
                f"a step of {len(step.lengths)} sequences is of requests {', '.join(names)}, of which"
                f" {', '.join(unknown) or 'none'} was not admitted",
                code="not-active.exact-tokens",
            )
        own = [self._places[name] for name in names]
        ends = zip(own, step.lengths, strict=True)
        first = np.array([place.first(self.sink, length) for place, length in ends], np.int64)
        low = np.maximum(np.array([place.taken for place in own], np.int64), first)
        until = np.maximum(low[numbered(np.diff(step.starts))[0]], step.positions.numpy() + 1 - self.recent)
        return self.ring.beside(step, np.array([place.row for place in own], np.int64), first, until)


def attend_beside(
    coded: Attended,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    store: Tensor,
    step: ServerStep,
    scale: float,
) -> Tensor:
    """Attention over coded tokens and over those that queries read exact, which are stored for later steps.

    By a compiled loop where a sequence has one query, there is what compiles it, and the dtype is one that it knows.

    Parameters
    ----------
    coded : Attended
        Attention over the coded tokens; used up.
    query : Tensor
        [tokens, heads, head_dim].
    key, value : Tensor
        Of the step's own tokens, as attention sees them [tokens, kv_heads, head_dim].
    store : Tensor
        The exact K and V of one layer [2, requests, kv_heads, places, head_dim] (`ExactStore.values`).
    step : ServerStep
        With its `exact`.
    scale : float
        Of the scores.

    Returns
    -------
    Tensor
        float32 [tokens, heads, head_dim].
    """
    chunks_beside(coded, query, key, value, store, step, scale)
    keep_exact(key, value, store, step.exact)
    singles_beside(coded, query, store, step.exact, scale)
    return coded.mean


def chunks_beside(
    coded: Attended, query: Tensor, key: Tensor, value: Tensor, store: Tensor, step: ServerStep, scale: float
) -> None:
    """Add what queries read exact that are not the only ones of their sequence.

    Before the step's tokens are kept, which take the places of what the first of these queries see.
    """
    for chunk in step.exact.chunks:
        own = torch.stack([key[chunk.queries], value[chunk.queries]]).transpose(1, 2)
        before = store[:, chunk.row]
        sinks = before[:, :, chunk.sinks], own[:, :, : chunk.own_sinks]
        recents = before[:, :, chunk.recents], own[:, :, chunk.own_recents :]
        kv = torch.cat([*sinks, *recents], dim=2)[:, None]
        for block in chunk.blocks:
            k, v = torch.cat([kv[:, :, :, block.sinks], kv[:, :, :, block.recents]], dim=3)
            coded.add(block.queries, of_block(query[block.queries], k, v, block.mask, scale))


def keep_exact(key: Tensor, value: Tensor, store: Tensor, exact: ExactStep, loops: bool = True) -> None:
    """Put those of a step's tokens that later ones read exact in their places."""
    if loops and by_loops(store, key):
        from kvlab.codecs.shared import softmax_numba

        k, v, values = (softmax_numba.as_numbers(x) for x in (key, value, store))
        softmax_numba.store(k, v, *exact.kept, values)
        return
    own = torch.stack([key, value])
    store[:, exact.stored_rows, :, exact.places] = own[:, exact.sources].transpose(0, 1)


def singles_beside(
    coded: Attended, query: Tensor, store: Tensor, exact: ExactStep, scale: float, loops: bool = True
) -> None:
    """Add what queries read exact that are the only one of their sequence; after the step's tokens are kept."""
    if loops and by_loops(store, query):
        from kvlab.codecs.shared import softmax_numba

        q = np.ascontiguousarray(softmax_numba.as_numbers(query))  # the loop is compiled for each layout that it meets
        values = softmax_numba.as_numbers(store)
        softmax_numba.add_exact(*exact.singles, q, values, scale, *(part.numpy() for part in coded))
    elif len(exact.single):
        k, v = store[:, exact.single_rows]
        mean, log_sum = softmax_over(query[exact.single, :, None], k, v, exact.single_mask, scale)
        coded.add(exact.single, Attended(mean[:, :, 0], log_sum[:, :, 0]))


def by_loops(store: Tensor, x: Tensor) -> bool:
    """Whether compiled loops keep and read exact tokens beside `x`: they can be, and know the dtype that both have."""
    return compiled() and store.dtype == x.dtype in (torch.bfloat16, torch.float32)
