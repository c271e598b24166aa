"""Without any codec: how far each engine and dtype is from the float32 truth."""

from __future__ import annotations

import polars as pl

from kvlab_pipeline.pages import marks
from kvlab_pipeline.pages.figure import Figure
from kvlab_pipeline.pages.parts import KL_UNIT


def baseline_table(metrics: dict) -> pl.DataFrame | None:
    """One row per uncompressed run: its KL to the float32 truth, nats per token."""
    rows = [
        {key: row[key] for key in ("run", "engine", "dtype", "attention")} | marks.interval(row["kl"])
        for row in metrics.get("baseline") or []
    ]
    return pl.DataFrame(rows) if rows else None


def baseline(table: pl.DataFrame) -> Figure:
    """Dots with intervals on a logarithmic axis, one row per run."""
    return marks.by_row(
        table,
        name=run_name,
        words=lambda line: [run_name(line), marks.quantity("KL", line), marks.basis(line)],
        title="Without any codec: how far each engine and dtype is from the float32 truth",
        axis=f"KL to the float32 truth, {KL_UNIT} (logarithmic)",
        note="The axis is logarithmic; an arrow at its left end stands for a value that is not above zero.",
        labelled=True,
    )


def run_name(line: dict) -> str:
    """A run in words."""
    return ", ".join(line[key] for key in ("engine", "dtype", "attention"))
