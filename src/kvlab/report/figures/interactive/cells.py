"""Interactive: what the codec costs, cell by cell."""

from __future__ import annotations

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.cells import cell_name
from kvlab.report.figures.interactive import marks
from kvlab.report.figures.interactive.rows import by_row
from kvlab.report.tables import parts as tables


def interactive_cells(table: pl.DataFrame):
    """One row per recipe and protocol, one dot per engine, net KL on a logarithmic axis."""
    return by_row(
        table,
        name=cell_name,
        said=cell_words,
        title=f"net KL, {tables.KL_UNIT}",
        note="Rows are named by cell, protocol and variance_ratio. Net KL is KL less the engine's own noise "
        "floor. The axis is logarithmic; an arrow at its left end stands for a value that is not above zero.",
    )


def cell_words(line: dict) -> list[str]:
    """A cell's hover text."""
    return [
        cell_name(line),
        f"{line['engine']}, {line['dtype']}",
        marks.quantity("net KL", line),
        f"{fmt.number(line['bits_per_value'])} bits per value",
        marks.basis(line),
        f"cell {line['cell_id']}",
    ]
