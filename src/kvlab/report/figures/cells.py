"""What the codec costs, cell by cell."""

from __future__ import annotations

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import (
    GREY,
    canvas,
    colour_of,
    dot,
    interval,
    legend,
    log_axis,
    rows_axis,
    styled,
    title,
)


def cells_table(metrics: dict) -> pl.DataFrame | None:
    """One row per coded cell in the dtype of the gap: net KL and bits per value."""
    coded = [cell for cell in metrics.get("cells") or [] if cell["role"] == "codec"]
    reduced = [cell for cell in coded if cell["dtype"] != "float32"]
    keys = ("cell_id", "label", "engine", "dtype", "protocol", "variance_ratio", "bits_per_value")
    rows = [
        {key: cell[key] for key in keys} | interval(cell["kl_net"])
        for cell in reduced or coded
        if cell["kl_net"] is not None
    ]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


@styled
def cells(table: pl.DataFrame):
    """One row per recipe and protocol, one dot per engine, net KL on a logarithmic axis."""
    lines = table.to_dicts()
    names = list(dict.fromkeys(cell_name(line) for line in lines))
    engines = list(dict.fromkeys(line["engine"] for line in lines))
    figure, (axis,) = canvas(height=1.35 + 0.42 * len(names))
    floor = log_axis(axis, table)
    for line in lines:
        shift = 0.24 * (engines.index(line["engine"]) - (len(engines) - 1) / 2)
        dot(axis, names.index(cell_name(line)) + shift, line, colour_of(line["engine"]), floor)
    rows_axis(axis, names)
    legend(axis, engines)
    axis.text(
        -0.008,
        1.0,
        "cell, protocol, variance_ratio",
        transform=axis.transAxes,
        color=GREY,
        ha="right",
        va="bottom",
        fontsize=8,
    )
    axis.set_xlabel("KL net of the engine's own noise floor, nats per token (logarithmic)")
    title(figure, f"What the codec costs, cell by cell ({', '.join(dtypes(lines))})")
    return figure


def cell_name(line: dict) -> str:
    """A cell's name on the axis: what is coded, where, at which ratio if it has one."""
    parts = [line["label"], line["protocol"]]
    if line["variance_ratio"] is not None:
        parts.append(fmt.plain(line["variance_ratio"]))
    return ", ".join(parts)


def dtypes(lines: list[dict]) -> list[str]:
    """The dtypes of some rows, each once."""
    return list(dict.fromkeys(line["dtype"] for line in lines))
