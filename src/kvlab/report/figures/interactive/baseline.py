"""Interactive: how far each engine and dtype is from the float32 truth without any codec."""

from __future__ import annotations

import polars as pl

from kvlab.report.figures.interactive import marks
from kvlab.report.figures.interactive.rows import by_row
from kvlab.report.tables import parts as tables


def interactive_baseline(table: pl.DataFrame):
    """Dots with intervals on a logarithmic axis, one row per run."""
    return by_row(
        table,
        name=run_name,
        said=lambda line: [run_name(line), marks.quantity("KL", line), marks.basis(line)],
        title=f"KL to the float32 truth, {tables.KL_UNIT}",
        note="The axis is logarithmic; an arrow at its left end stands for a value that is not above zero.",
    )


def run_name(line: dict) -> str:
    """A run in words."""
    return ", ".join(line[key] for key in ("engine", "dtype", "attention"))
