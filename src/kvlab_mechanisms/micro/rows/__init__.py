"""The rows, a module of mechanisms each; `ALL` makes them by the ids that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvlab_mechanisms.micro.row import BenchRow
from kvlab_mechanisms.micro.rows import attention, cluster, decoding, ledger, memory, serving

ALL: tuple[Callable[[], Iterator[BenchRow]], ...] = (
    attention.rows,
    memory.rows,
    decoding.rows,
    cluster.rows,
    ledger.rows,
    serving.rows,
)
