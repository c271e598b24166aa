"""Timing that treats all alike: every task is run once per round, so a noisy moment hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Tasks = dict[tuple[str, ...], Callable[[], object]]


def interleaved(tasks: Tasks, rounds: int, threads: tuple[int, ...]) -> dict[tuple, list[float]]:
    """Seconds of each task, by its key and the number of torch threads.

    Each task is run once before, untimed. A round runs every task under every number of threads, starting
    at another task than the round before.

    Returns
    -------
    dict
        ``(*key, threads)`` -> one time per round.
    """
    before = torch.get_num_threads()
    names = list(tasks)
    taken: dict[tuple, list[float]] = {(*name, count): [] for name in names for count in threads}
    try:
        for task in tasks.values():
            task()
        for number in range(rounds):
            first = number * len(names) // rounds
            for count in threads:
                torch.set_num_threads(count)
                for name in names[first:] + names[:first]:
                    begun = time.perf_counter()
                    tasks[name]()
                    taken[(*name, count)].append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(before)
    return taken


def rate(nbytes: int, seconds: list[float]) -> dict[str, float]:
    """MB/s of `nbytes`: median over the rounds, worst and best."""
    rates = [nbytes / 1e6 / second for second in seconds]
    return {"value": statistics.median(rates), "low": min(rates), "high": max(rates)}
