"""Whom to preempt, and how: shortest remaining time first, and swap or recompute by what each costs.

With sizes that are known and no cost of switching, serving whoever has least left has the smallest mean flow time that
there is (Schrage 1968, Operations Research 16:687). A preempted sequence of n tokens comes back by 2 n bytes /
bandwidth seconds of copies or by a prefill of n tokens; where copies are dear for short ones and prefill is quadratic,
there is a length from which copying wins, and fewer bits a value bring it down.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlab.core.errors import UserError
from kvlab_mechanisms.serving.worker import Costs, Job


@dataclass(frozen=True)
class Switch:
    """Swap or recompute.

    Parameters
    ----------
    costs : Costs
        Of the worker's steps.
    chunk : int
        Prompt tokens of a step.
    token_bytes : float
        Of K and V of a token as they are stored.
    bandwidth : float
        Bytes per second between the pages and the host's memory.
    setup : float
        Seconds that a copy takes beside its bytes, each way.
    """

    costs: Costs
    chunk: int
    token_bytes: float
    bandwidth: float
    setup: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise UserError(f"bandwidth {self.bandwidth:g}; allowed: above 0 bytes per second")

    def one_way(self, tokens: int) -> float:
        """Seconds of a copy."""
        return self.setup + tokens * self.token_bytes / self.bandwidth

    def recompute(self, tokens: int) -> float:
        """Seconds of the prefill that makes the cache again."""
        return self.costs.prompt(tokens, self.chunk)

    def __call__(self, tokens: int) -> float | None:
        """Seconds of one way where swapping is not dearer, else None; what `Worker` asks."""
        return self.one_way(tokens) if 2 * self.one_way(tokens) <= self.recompute(tokens) else None

    def cost(self, tokens: int) -> float:
        """Seconds that a preemption of so many tokens costs, the cheaper way."""
        return min(2 * self.one_way(tokens), self.recompute(tokens))

    def break_even(self, most: int = 1 << 20) -> int | None:
        """The length from which swapping is never dearer, up to `most` tokens; None where there is none.

        Found from above: prefill takes a step more at each chunk, so one length may pay and the next not.
        """
        if self(most) is None:
            return None
        linear = self.costs.step / self.chunk + self.costs.prefill - 2 * self.token_bytes / self.bandwidth
        if linear < 0:  # copies win only by the quadratic term, beyond which they win for good
            low, high = 0, most
            while high - low > 1:
                middle = (low + high) // 2
                safe = linear * middle + self.costs.pair * middle * middle / 2 >= 2 * self.setup
                low, high = (low, middle) if safe else (middle, high)
            start = high
        else:
            start = min(most, int(2 * self.setup / linear) + 1) if linear else most
        while start > 1 and self(start - 1) is not None:
            start -= 1
        return start


def remaining_first(predict: Callable[[Job], float], ageing: float = 0.0) -> Callable[[Job], float]:
    """An order of `Worker`'s queue: least predicted time left first.

    With an ageing of a, a second of waiting counts as a seconds less to do, so nobody who comes more than (time left) /
    a later is let in before. The rank ``left + a t`` orders as ``left - a (now - t)`` does at any time, so a heap needs
    no new order as time goes by.
    """
    if ageing < 0:
        raise UserError(f"ageing {ageing:g}; allowed: 0 or more")
    return lambda job: predict(job) + ageing * job.t


@dataclass(frozen=True)
class Flow:
    """Of jobs on one server: when each ended, how often one was preempted, and seconds that switching took."""

    ends: tuple[float, ...]
    preemptions: int
    switching: float

    def mean(self, arrivals: Sequence[float]) -> float:
        """Mean seconds from arrival to end."""
        return sum(end - t for end, t in zip(self.ends, arrivals, strict=True)) / len(self.ends)


def one_server(jobs: Sequence[tuple[float, float]], cost: float = 0.0, ageing: float = 0.0) -> Flow:
    """Serve `(arrival, size)` on one server: an arrival preempts when it has less to do by more than the cost.

    A job that was preempted has `cost` more to do.
    """
    order = sorted(range(len(jobs)), key=lambda j: jobs[j][0])
    left = [size for _, size in jobs]
    ends, queue, now, preemptions, switching, current = [0.0] * len(jobs), [], 0.0, 0, 0.0, None
    rank = lambda j: left[j] + ageing * jobs[j][0]  # noqa: E731
    while order or queue or current is not None:
        if current is None and queue:
            current = heapq.heappop(queue)[1]
        if current is None:
            now = max(now, jobs[order[0]][0])
        until = now + left[current] if current is not None else now
        if not order or (current is not None and until <= jobs[order[0]][0]):
            now, left[current], ends[current], current = until, 0.0, until, None
            continue
        new = order.pop(0)
        if current is not None:
            left[current] -= jobs[new][0] - now
        now = jobs[new][0]
        if current is not None and rank(new) + cost < rank(current):
            left[current] += cost
            preemptions, switching = preemptions + 1, switching + cost
            heapq.heappush(queue, (rank(current), current))
            current = new
        else:
            heapq.heappush(queue, (rank(new), new))
    return Flow(tuple(ends), preemptions, switching)
