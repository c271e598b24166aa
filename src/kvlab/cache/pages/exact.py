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
from torch import Tensor

from kvlab.cache.pages.attention import Attended, ExactStep, Running, ServerStep, nothing
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


class Place(NamedTuple):
    """What a running request has: its row of the store, and how many tokens it took from the prefix cache."""

    row: int
    taken: int

    def first(self, sink: int, length: int) -> int:
        """Where the coded tokens of its `length` tokens begin."""
        return 0 if self.taken else min(sink, length)


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
        self.sink, self.recent, self.requests = sink, recent, requests
        shape = (layers, 2, requests * self.tokens, kv_heads, head_dim)
        self.bytes_per_request = layers * 2 * self.tokens * kv_heads * head_dim * dtype.itemsize
        # numpy's zeros are given by the system when they are first written to, torch's at once
        memory = np.zeros(self.nbytes, dtype=np.uint8)
        self.values = torch.from_numpy(memory).view(dtype).view(shape)
        self._free = list(range(requests))[::-1]
        self._places: dict[str, Place] = {}
        self.running: Callable[[], Sequence[str]] = list  # names of a step's requests, as vLLM's runner orders them

    @property
    def tokens(self) -> int:
        """Places of a request."""
        return self.sink + self.recent

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
        self._places[name] = Place(row, taken)

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
        firsts = [place.first(self.sink, length) for place, length in zip(own, step.lengths, strict=True)]
        first, length = torch.tensor(firsts), torch.tensor(step.lengths)
        base = torch.tensor([place.row * self.tokens for place in own])
        low = torch.tensor([place.taken for place in own]).maximum(first)
        counts = torch.tensor(step.starts).diff()
        row, position = torch.arange(len(names)).repeat_interleave(counts), step.positions()
        until = torch.maximum(low[row], position + 1 - self.recent)

        sinks, recents = position < first[row], position >= length[row] - self.recent
        ring = self.sink + position % max(1, self.recent)
        sources = torch.cat([sinks.nonzero()[:, 0], recents.nonzero()[:, 0]])
        places = base[row[sources]] + torch.cat([position[sinks], ring[recents]])

        single = torch.tensor(step.starts[:-1])[counts == 1]
        last, at = position[single][:, None], torch.arange(self.tokens)
        newest = last - (last + self.sink - at) % max(1, self.recent)  # of the tokens that this place of the ring had
        as_sink = (at < first[row[single]][:, None]) & (at <= last)
        seen = torch.where(at < self.sink, as_sink, newest >= until[single][:, None])
        exact = ExactStep(
            self.sink,
            self.recent,
            tuple(base.tolist()),
            sources,
            places,
            single,
            base[row[single]][:, None] + at,
            seen,
        )
        return replace(step, first=tuple(firsts), until=until, exact=exact)


def attend(query: Tensor, key: Tensor, value: Tensor, store: Tensor, step: ServerStep, scale: float) -> Attended:
    """Attention of a step's queries over the tokens that each of them reads exact, which are stored for later steps.

    Parameters
    ----------
    query : Tensor
        [tokens, heads, head_dim].
    key, value : Tensor
        Of the step's own tokens, as attention sees them [tokens, kv_heads, head_dim].
    store : Tensor
        The exact K and V of one layer [2, places, kv_heads, head_dim] (`ExactStore.values`).
    step : ServerStep
        With its `exact`.
    scale : float
        Of the scores.
    """
    exact, found = step.exact, nothing(query)
    for row, (start, stop) in enumerate(zip(step.starts, step.starts[1:], strict=False)):
        if stop - start > 1:  # before the step's tokens are stored: they take the places of what its first ones see
            own = slice(start, stop)
            mean, log_sum = _chunk(query[own], (key[own], value[own]), store, step, row, scale)
            found.mean[own], found.log_sum[own] = mean, log_sum
    store[0, exact.places], store[1, exact.places] = key[exact.sources], value[exact.sources]
    if len(exact.single):
        mean, log_sum = _singles(query[exact.single], store, exact, scale)
        found.mean[exact.single], found.log_sum[exact.single] = mean, log_sum
    return found


def _singles(query: Tensor, store: Tensor, exact: ExactStep, scale: float) -> Attended:
    """Of queries that are alone, over their own places, all at once."""
    n, heads, head_dim = query.shape
    k, v = (part[exact.single_places].transpose(1, 2).float() for part in store)  # [n, kv_heads, places, head_dim]
    q = (query.float() * scale).view(n, k.shape[1], -1, head_dim)
    scores = (q @ k.mT).masked_fill_(~exact.single_seen[:, None, None], -torch.inf)
    log_sum = scores.logsumexp(-1, keepdim=True)
    weights = torch.exp(scores - log_sum.masked_fill(log_sum == -torch.inf, 0.0))
    return Attended((weights @ v).view(n, heads, head_dim), log_sum.view(n, heads))


def _chunk(
    query: Tensor, own: tuple[Tensor, Tensor], store: Tensor, step: ServerStep, row: int, scale: float
) -> Attended:
    """Of one sequence's queries, over stored tokens and their own."""
    exact, length, base = step.exact, step.lengths[row], step.exact.base[row]
    begin, kv_heads = length - len(query), store.shape[2]
    position = torch.arange(begin, length)
    until = step.until[step.starts[row] : step.starts[row + 1]]
    running = Running(query, kv_heads, scale, store.shape[-1])

    def attend_to(first: int, last: int, place: Callable[[Tensor], Tensor], low: Tensor) -> None:
        """Positions `first` to `last` - 1: those before this step from their places, the step's own as they came."""
        before = base + place(torch.arange(first, max(first, min(last, begin))))
        new = slice(max(0, first - begin), max(0, last - begin))
        k, v = (
            torch.cat([part[before], mine[new]]).transpose(0, 1).float() for part, mine in zip(store, own, strict=True)
        )
        running.attend(k, v, first, low, position + 1)

    if step.first[row]:
        attend_to(0, step.first[row], lambda at: at, torch.zeros_like(position))
    if exact.recent:
        attend_to(int(until[0]), length, lambda at: exact.sink + at % exact.recent, until)
    return running.result(None)
