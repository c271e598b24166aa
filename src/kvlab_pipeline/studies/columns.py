"""Columns made of columns: what a cell costs beyond its floor, sums of cells, and differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvlab.core.errors import MissingResult
from kvlab.stats.bootstrap import Bootstrap, Column, refuse_unpaired
from kvlab_pipeline.studies.baselines import identity_of
from kvlab_pipeline.studies.measured import Measured, Results


def net_kl(results: Results, measured: Measured) -> Column:
    """KL of a cell minus that of its identity cell, window by window.

    Raises
    ------
    MissingResult
        There is no identity cell of the same engine, dtype and protocol.
    """
    floor, cell = identity_of(results, measured), measured.cell
    if floor is None:
        raise MissingResult(
            f"cell {cell.label!r} has no identity cell of {cell.engine}, {cell.dtype}, {cell.protocol} beside it",
            code="missing-result.identity",
        )
    return subtracted(measured.column("kl"), floor.column("kl", cell.windows))


def subtracted(a: Column, b: Column) -> Column:
    """`a` minus `b`, paired by window and position."""
    refuse_unpaired([a, b])
    return replace(a, sums=a.sums - b.sums)


def added(columns: Sequence[Column]) -> Column:
    """The sum of paired columns, at least one."""
    refuse_unpaired(columns)
    return replace(columns[0], sums=sum(column.sums for column in columns))


def divides(boot: Bootstrap, column: Column) -> bool:
    """Whether a ratio to this column's mean means anything: it is clear of zero, or above it in every window."""
    return bool((column.means > 0).all()) or boot.mean(column).low > 0
