"""A service that really runs, paced by the policies of the simulator: who is asked, when, and of which worker.

`pace` takes a trace and the same front, router and order as `simulate`, holds back what a worker has no room for, and
notes when each request came and when its tokens did. How a worker is asked is the caller's: nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from kvlab.core.errors import UserError
from kvlab_mechanisms.serving.simulate import Front, RoundRobin, Router
from kvlab_mechanisms.serving.trace import Trace
from kvlab_mechanisms.serving.worker import Job, Order, first_come

Ask = Callable[[int, int], AsyncIterator[None]]
"""Asks a worker for a request, by their numbers, and yields whenever tokens come."""


@dataclass(frozen=True)
class ClientTimes:
    """What the client saw, in seconds of its clock since it began; NaN where it did not come to that.

    Parameters
    ----------
    came, first, last : ndarray [n]
        When each request was there to be asked for, and when its first and its last tokens came.
    output : ndarray [n]
        Tokens of each answer.
    denied : ndarray [n] of bool
        Turned away by the front or the router.
    failed : tuple of (int, str)
        Requests whose worker failed them, and what it said.
    """

    came: NDArray
    first: NDArray
    last: NDArray
    output: NDArray
    denied: NDArray
    failed: tuple[tuple[int, str], ...]

    @property
    def ttft(self) -> NDArray:
        """Seconds to the first token, from when a request came."""
        return self.first - self.came

    @property
    def tpot(self) -> NDArray:
        """Seconds per token after the first; NaN of answers of one token."""
        after = np.where(self.output > 1, self.output - 1, np.nan)
        return (self.last - self.first) / after

    @property
    def tokens_per_s(self) -> float:
        """Of answers that ended, from the first request to the last token."""
        done = ~np.isnan(self.last)
        return float(self.output[done].sum() / (np.nanmax(self.last) - self.came[0]))


@dataclass
class _Run:
    """A trace under way."""

    trace: Trace
    ask: Ask
    slots: int
    router: Router
    clock: Callable[[], float]
    began: float
    first: list[float]
    last: list[float]
    failed: list[tuple[int, str]] = field(default_factory=list)
    waiting: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)
    under_way: set[asyncio.Task] = field(default_factory=set)

    def take(self, worker: int, rank: float, number: int) -> None:
        """A request waits for its worker, which is asked at once if it has room."""
        heapq.heappush(self.waiting.setdefault(worker, []), (rank, number))
        self.fill(worker)

    def fill(self, worker: int) -> None:
        """Ask a worker for those that come first, as long as it has room."""
        queue = self.waiting[worker]
        while queue and self.busy.get(worker, 0) < self.slots:
            self.busy[worker] = self.busy.get(worker, 0) + 1
            task = asyncio.create_task(self.serve(worker, heapq.heappop(queue)[1]))
            self.under_way.add(task)
            task.add_done_callback(self.under_way.discard)

    async def serve(self, worker: int, number: int) -> None:
        """Note when tokens come; a worker that fails a request goes on with others, and the router is told."""
        ok = True
        try:
            async for _ in self.ask(worker, number):
                self.last[number] = self.clock() - self.began
                if math.isnan(self.first[number]):
                    self.first[number] = self.last[number]
        except Exception as error:
            self.failed.append((number, f"{type(error).__name__}: {error}"))
            self.last[number], ok = math.nan, False
        self.busy[worker] -= 1
        self.router.complete(worker, ok)
        self.fill(worker)


async def pace(
    trace: Trace,
    ask: Ask,
    workers: int = 1,
    slots: int = 8,
    router: Router | None = None,
    front: Front | None = None,
    order: Order = first_come,
    clock: Callable[[], float] = monotonic,
) -> ClientTimes:
    """Send a trace's requests at its times.

    Parameters
    ----------
    trace : Trace
    ask : Ask
    workers : int
    slots : int
        Requests that a worker is asked for at once; the others wait here, in `order`.
    router, front
        See `simulate`.
    order : Order
        Whoever has the smallest is asked for first.
    clock : callable
        Seconds, that of the running loop.

    Raises
    ------
    UserError
        No worker, or no room on one.
    """
    if workers < 1 or slots < 1:
        raise UserError(f"{workers} workers with {slots} slots; allowed: at least 1 of each", code="user.no-slots")
    count, began, router = len(trace), clock(), router or RoundRobin(workers)
    run = _Run(trace, ask, slots, router, clock, began, [math.nan] * count, [math.nan] * count)
    came, denied = np.empty(count), np.zeros(count, bool)
    rows = zip(*(getattr(trace, name).tolist() for name in ("t", "prompt", "output", "prefix", "shared")), strict=True)
    for number, (t, prompt, output, prefix, shared) in enumerate(rows):
        await asyncio.sleep(max(0.0, began + t - clock()))
        came[number] = now = clock() - began
        let_in = front is None or front(now, number)
        worker = router.route(prefix) if let_in else None
        if worker is None:
            denied[number] = True
        else:
            run.take(worker, order(Job(number, now, prompt, output, prefix, shared)), number)
    while run.under_way:
        await asyncio.gather(*run.under_way)
    ends = np.array(run.first), np.array(run.last)
    return ClientTimes(came, *ends, trace.output, denied, tuple(sorted(run.failed)))
