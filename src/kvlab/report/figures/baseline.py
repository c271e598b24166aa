"""Without any codec: how far each engine and dtype is from the float32 truth."""

from __future__ import annotations

import polars as pl

from kvlab.report.figures.canvas import canvas, colour_of, dot, interval, log_axis, rows_axis, styled, title


def baseline_table(metrics: dict) -> pl.DataFrame | None:
    """One row per uncompressed run: its KL to the float32 truth, nats per token."""
    rows = [
        {key: row[key] for key in ("run", "engine", "dtype", "attention")} | interval(row["kl"])
        for row in metrics.get("baseline") or []
    ]
    return pl.DataFrame(rows) if rows else None


@styled
def baseline(table: pl.DataFrame):
    """Dots with intervals on a logarithmic axis, one row per run."""
    figure, (axis,) = canvas(height=1.15 + 0.36 * len(table))
    floor = log_axis(axis, table, labelled=True)
    for row, line in enumerate(table.iter_rows(named=True)):
        dot(axis, row, line, colour_of(line["engine"]), floor, label=True)
    names = [f"{r['engine']}, {r['dtype']}, {r['attention']}" for r in table.iter_rows(named=True)]
    rows_axis(axis, names)
    axis.set_xlabel("KL to the float32 truth, nats per token (logarithmic)")
    title(figure, "Without any codec: how far each engine and dtype is from the float32 truth")
    return figure
