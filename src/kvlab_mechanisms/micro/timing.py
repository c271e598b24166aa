"""Times of short operations: ours and a rival's in turn, in one process, on one thread."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

ROUNDS = 15
LEAST = 1e-3  # seconds of a round, so that the clock's own steps do not count


@dataclass(frozen=True)
class Timed:
    """Microseconds of a call: one figure a round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self.rounds)


def timed(tasks: dict[str, Callable[[], object]], rounds: int = ROUNDS, seed: int = 0) -> dict[str, Timed]:
    """Each task once a round, in an order that is drawn anew; without the garbage collector, on one thread.

    A call that is shorter than a millisecond is repeated within a round, and the empty loop's time taken out.
    """
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        calls = {name: repeats(task) for name, task in tasks.items()}
        taken: dict[str, list[float]] = {name: [] for name in tasks}
        order, draw = list(tasks), random.Random(seed)
        for _ in range(rounds):
            draw.shuffle(order)
            for name in order:
                empty = lasted(nothing, calls[name]) if calls[name] > 1 else 0.0
                spent = lasted(tasks[name], calls[name]) - empty
                taken[name].append(max(spent, 0.0) / calls[name] * 1e6)
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
    return {name: Timed(tuple(times)) for name, times in taken.items()}


def repeats(task: Callable[[], object]) -> int:
    """Calls that fill a round; the first ones, which fill caches, are not counted."""
    task()
    calls = 1
    while (spent := lasted(task, calls)) < LEAST and calls < 1 << 20:
        calls *= 2 if not spent else max(2, min(64, round(LEAST / spent)))
    return calls


def lasted(task: Callable[[], object], calls: int) -> float:
    """Seconds of so many calls."""
    begun = time.perf_counter()
    for _ in range(calls):
        task()
    return time.perf_counter() - begun


def nothing() -> None:
    """What an empty loop calls."""


def ratio(rival: Timed, ours: Timed, resamples: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """How many times as long the rival takes, and a 95 % bootstrap interval over rounds, both of the same rounds."""
    a, b = np.array(rival.rounds), np.array(ours.rounds)
    drawn = np.random.default_rng(seed).integers(0, len(a), (resamples, len(a)))
    ratios = np.median(a[drawn], 1) / np.median(b[drawn], 1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return rival.median / ours.median, float(low), float(high)
