"""Reads one layer ahead: while a layer is rebuilt, another thread takes the next one's indices off the stream.

What an entropy coder wrote of a layer is read without any other layer, and what is rebuilt needs the layer below: two
kinds of work, of about equal length, side by side. What comes out is the same, as neither sees the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def one_ahead(read: Callable[[int], T], count: int) -> Iterator[Iterator[T]]:
    """What ``read(0)``, ``read(1)``, ... give, each read while the one before is used.

    One is held beside the one in use. Torch has one thread fewer while the context is open, since the reading has one;
    where it has only one, all is done in turn. Where the context ends early, the reading that has begun is waited for.

    Parameters
    ----------
    read : callable
        Takes a number; calls for different ones share nothing that either changes.
    count : int
        How many there are, at least one.
    """
    threads = torch.get_num_threads()
    if threads < 2:
        yield map(read, range(count))
        return
    torch.set_num_threads(threads - 1)
    try:
        with ThreadPoolExecutor(1) as pool:
            yield _results(pool, read, count, pool.submit(read, 0))
    finally:
        torch.set_num_threads(threads)


def _results(pool: ThreadPoolExecutor, read: Callable[[int], T], count: int, coming: Future[T]) -> Iterator[T]:
    for number in range(count):
        found = coming.result()
        if number + 1 < count:
            coming = pool.submit(read, number + 1)
        yield found
