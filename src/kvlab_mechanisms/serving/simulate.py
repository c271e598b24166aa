"""The simulator: a trace served by one or many workers, on a clock that is told by events alone.

Nothing reads the machine's clock and no chance is drawn, so the same trace gives the same report. It walks requests
and changes, not steps: a million requests take less than a minute of one core.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlab.core.errors import Fault, UserError
from kvlab_mechanisms.serving.trace import NONE, Trace
from kvlab_mechanisms.serving.worker import Job, Worker


class Router(Protocol):
    """Which worker takes a request."""

    def route(self, key: int) -> int | None:
        """A worker for a request with this prefix (-1: none); None where none may take it."""

    def complete(self, worker: int, ok: bool = True) -> None:
        """A worker has done one of its requests, or has failed it."""


Front = Callable[[float, int], bool]
"""Whether a request, by its number in the trace, is let through at that time."""


@dataclass(frozen=True)
class Slo:
    """Targets of latency, in seconds; infinite where there is none."""

    ttft: float = math.inf
    tpot: float = math.inf


@dataclass(frozen=True)
class SimulatedRun:
    """What a run shows.

    Parameters
    ----------
    ttft, tpot : ndarray [n]
        Seconds to the first token, and per token after it, of each request in the trace's order; NaN of those that
        were not served, and the second of answers of one token.
    output : ndarray [n]
        Tokens of each answer.
    latency : ndarray [n]
        Seconds to the last token; NaN as above.
    denied, refused : int
        Requests that the front or the router turned away, and those that no memory holds.
    span : float
        Seconds from the first arrival to the last answer.
    tokens : int
        Of all answers.
    preemptions, swaps, lost : int
        How often a sequence was preempted, and of these to the host's memory; tokens that were computed again.
    moved : float
        Bytes to and from the host's memory.
    busy : float
        Share of the span that a worker was at work, the mean of all.
    peak : int
        Sequences at once on one worker, at most.
    capacity : int
        Tokens that the KV memory of a worker holds.
    workers : int
    """

    ttft: NDArray
    tpot: NDArray
    output: NDArray
    latency: NDArray
    denied: int
    refused: int
    span: float
    tokens: int
    preemptions: int
    swaps: int
    lost: int
    moved: float
    busy: float
    peak: int
    capacity: int
    workers: int

    def good(self, slo: Slo) -> NDArray:
        """Which requests were served within the targets, [n] of bool."""
        return (self.ttft <= slo.ttft) & (np.isnan(self.tpot) | (self.tpot <= slo.tpot))

    def goodput(self, slo: Slo) -> float:
        """Requests per second within the targets."""
        return float(self.good(slo).sum()) / self.span

    def report(self, slo: Slo) -> dict:
        """Figures for pages and programs; percentiles are of requests that were served."""
        done = ~np.isnan(self.ttft)
        found = {
            "requests": len(self.ttft),
            "served": int(done.sum()),
            "denied": self.denied,
            "refused": self.refused,
            "seconds": self.span,
            "requests_per_s": float(done.sum()) / self.span,
            "tokens_per_s": self.tokens / self.span,
            "goodput_per_s": self.goodput(slo),
            "good_tokens_per_s": float(self.output[self.good(slo)].sum()) / self.span,
            "within_targets": float(self.good(slo).mean()),
            "slo": {name: seconds if math.isfinite(seconds) else None for name, seconds in vars(slo).items()},
        }
        for name in ("ttft", "tpot"):
            values = getattr(self, name)
            values = values[~np.isnan(values)]
            for rank in (50, 90, 99):
                found[f"{name}_p{rank}"] = float(np.percentile(values, rank)) if len(values) else None
        kept = ("preemptions", "swaps", "lost", "moved", "busy", "peak", "capacity", "workers")
        return found | {name: getattr(self, name) for name in kept}


@dataclass
class RoundRobin:
    """Every worker in its turn."""

    workers: int
    _next: int = field(default=0)

    def route(self, key: int) -> int:
        """See `Router`."""
        self._next = (self._next + 1) % self.workers
        return self._next - 1 if self._next else self.workers - 1

    def complete(self, worker: int, ok: bool = True) -> None:
        """See `Router`."""


def simulate(
    trace: Trace, workers: Sequence[Worker], router: Router | None = None, front: Front | None = None
) -> SimulatedRun:
    """Serve a trace.

    Parameters
    ----------
    trace : Trace
    workers : sequence of Worker
        All of them new.
    router : Router, optional
        In turn by default.
    front : Front, optional
        Asked before the router; it lets everything through by default.

    Raises
    ------
    UserError
        No worker.
    Fault
        A worker came to rest with requests that it had not served.
    """
    if not workers:
        raise UserError("0 workers; allowed: at least 1", code="user.no-workers")
    count, router = len(trace), router or RoundRobin(len(workers))
    first, last = [math.nan] * count, [math.nan] * count
    rows = zip(*(getattr(trace, name).tolist() for name in ("t", "prompt", "output", "prefix", "shared")), strict=True)
    events: list[tuple[float, int, int]] = []  # time, worker, version
    versions = [0] * len(workers)
    denied = refused = 0

    def due(at: int, when: float | None) -> None:
        if when is not None:
            versions[at] += 1
            heapq.heappush(events, (when, at, versions[at]))

    def run_until(limit: float) -> None:
        while events and events[0][0] <= limit:
            now, at, version = heapq.heappop(events)
            if version != versions[at]:
                continue
            worker = workers[at]
            for _ in worker.finish(now, first, last):
                router.complete(at)
            due(at, worker.plan(now))

    for number, (t, prompt, output, prefix, shared) in enumerate(rows):
        run_until(t)
        if front is not None and not front(t, number):
            denied += 1
            continue
        if (at := router.route(prefix)) is None:
            denied += 1
            continue
        worker = workers[at]
        if not worker.fits(prompt, output):
            router.complete(at)
            refused += 1
            continue
        due(at, worker.add(Job(number, t, prompt, output, prefix if shared else NONE, shared), t))
    run_until(math.inf)
    left = sum(len(one.waiting) + len(one.running) + len(one.filling) for one in workers)
    if left:
        raise Fault(
            f"{left} of {count} requests were neither served nor turned away; no figure of this run holds",
            code="fault.requests-left",
        )
    return _served(trace, workers, np.array(first), np.array(last), denied, refused)


def _served(
    trace: Trace, workers: Sequence[Worker], first: NDArray, last: NDArray, denied: int, refused: int
) -> SimulatedRun:
    done = ~np.isnan(last)
    ends = last[done]
    span = max(float(ends.max(initial=trace.t[-1]) - trace.t[0]), 1e-12)
    after = np.where(done & (trace.output > 1), (last - first) / np.maximum(trace.output - 1, 1), math.nan)
    total = {name: sum(getattr(one, name) for one in workers) for name in ("preemptions", "swaps", "lost", "moved")}
    return SimulatedRun(
        ttft=np.where(done, first - trace.t, math.nan),
        tpot=after,
        output=trace.output,
        latency=last - trace.t,
        denied=denied,
        refused=refused,
        span=span,
        tokens=int(trace.output[done].sum()),
        **total,
        busy=sum(one.busy for one in workers) / len(workers) / span,
        peak=max(one.peak for one in workers),
        capacity=workers[0].memory.pages * workers[0].memory.page,
        workers=len(workers),
    )
