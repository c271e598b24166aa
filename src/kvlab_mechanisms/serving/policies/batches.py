"""How many sequences at once: the most that latency and memory allow.

Latency by batch size is learnt as a rising line of straight pieces (isotonic regression by pooling adjacent violators;
Barlow et al. 1972, Statistical Inference under Order Restrictions). Memory allows floor(free bytes / (bytes of a
token x tokens of a sequence)): here fewer bits a value become more sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import Enum
from typing import Literal, NamedTuple

from kvlab.core.errors import UnknownName, UserError

Mode = Literal["throughput", "latency", "goodput"]
MODES = ("throughput", "latency", "goodput")


class BatchReason(Enum):
    """What the decision hangs on."""

    QUEUE = "no more are waiting"
    LIMIT = "the largest batch"
    MEMORY = "no more fit"
    LATENCY = "more would be too slow"
    SLOW = "even the smallest is too slow"
    UNKNOWN = "nothing was measured; growing by one"


class Decision(NamedTuple):
    """A batch size, what decided it, and the seconds that are expected, None where nothing was measured."""

    size: int
    reason: BatchReason
    expected: float | None


class Batches:
    """See the module.

    Parameters
    ----------
    mode : {"throughput", "latency", "goodput"}
        All that fit; the largest within the target; the size with the most sequences per second within it.
    target : float
        Seconds of a step.
    least, most : int
        Of a batch.
    weight : float
        Of a new observation in the running mean of its size.
    """

    def __init__(
        self, mode: Mode = "latency", target: float = 0.1, least: int = 1, most: int = 32, weight: float = 0.3
    ):
        if mode not in MODES:
            raise UnknownName("mode", mode, MODES)
        if not (1 <= least <= most and 0 < weight <= 1 and target > 0):
            raise UserError(f"batches of {least} to {most}, weight {weight:g}, target {target:g}; allowed: 1 or more")
        self.mode, self.target, self.least, self.most, self.weight = mode, target, least, most, weight
        self.means: dict[int, float] = {}
        self._guess = least
        self._line: tuple[list[int], list[float]] | None = None

    def record(self, size: int, seconds: float) -> None:
        """A step of so many sequences took so long."""
        old = self.means.get(size, seconds)
        self.means[size] = old + self.weight * (seconds - old)
        self._line = None
        self._guess = self._guess + 1 if seconds <= self.target else max(self.least, self._guess // 2)  # AIMD

    def line(self) -> tuple[list[int], list[float]]:
        """Sizes and rising seconds."""
        if self._line is None:
            sizes = sorted(self.means)
            pools: list[list[float]] = []  # mean, members
            for size in sizes:
                pools.append([self.means[size], 1])
                while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                    mean, count = pools.pop()
                    pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * count) / (pools[-1][1] + count),
                                 pools[-1][1] + count]  # fmt: skip
            self._line = sizes, [mean for mean, count in pools for _ in range(int(count))]
        return self._line

    def estimate(self, size: int) -> float | None:
        """Seconds of a step of so many: above what was measured the last piece goes on, below it is the smallest's."""
        sizes, seconds = self.line()
        if not sizes:
            return None
        if len(sizes) == 1:
            return seconds[0] * max(1.0, size / sizes[0])
        if size <= sizes[0]:
            return seconds[0]
        at = min(bisect_right(sizes, size), len(sizes) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at - 1] + slope * (size - sizes[at - 1])

    def next(self, queue: int, free_bytes: float | None = None, sequence_bytes: float = 0.0) -> Decision:
        """The next batch, of `queue` sequences that wait and memory for `free_bytes`; 0 where none waits or fits."""
        cap, reason = min(queue, self.most), BatchReason.QUEUE if queue <= self.most else BatchReason.LIMIT
        if free_bytes is not None and sequence_bytes > 0 and free_bytes // sequence_bytes < cap:
            cap, reason = int(free_bytes // sequence_bytes), BatchReason.MEMORY
        floor = min(self.least, cap)
        if cap <= floor or self.mode == "throughput":
            return Decision(cap, reason, self.estimate(cap))
        if not self.means:
            return Decision(max(floor, min(cap, self._guess)), BatchReason.UNKNOWN, None)
        low, high = floor, cap  # the largest within the target, for the line rises
        if self.estimate(floor) > self.target:
            return Decision(floor, BatchReason.SLOW, self.estimate(floor))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.estimate(middle) <= self.target else (low, middle - 1)
        if self.mode == "goodput":
            low = max(range(floor, low + 1), key=lambda size: (size / max(self.estimate(size), 1e-12), size))
        return Decision(low, reason if low == cap else BatchReason.LATENCY, self.estimate(low))
