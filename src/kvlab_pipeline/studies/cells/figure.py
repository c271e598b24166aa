"""What the codec costs, cell by cell."""

from __future__ import annotations

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.pages import marks
from kvlab_pipeline.pages.figure import Figure
from kvlab_pipeline.pages.parts import KL_UNIT


def cells_table(metrics: dict) -> pl.DataFrame | None:
    """One row per coded cell in the dtype of the gap: net KL and bits per value."""
    coded = [cell for cell in metrics.get("cells") or [] if cell["role"] == "codec"]
    reduced = [cell for cell in coded if cell["dtype"] != "float32"]
    keys = ("cell_id", "label", "engine", "dtype", "protocol", "variance_ratio", "bits_per_value")
    rows = [
        {key: cell[key] for key in keys} | marks.interval(cell["kl_net"])
        for cell in reduced or coded
        if cell["kl_net"] is not None
    ]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def cells(table: pl.DataFrame) -> Figure:
    """One row per recipe and protocol, one dot per engine, net KL on a logarithmic axis."""
    return marks.by_row(
        table,
        name=cell_name,
        words=cell_words,
        title=f"What the codec costs, cell by cell ({', '.join(dict.fromkeys(table['dtype']))})",
        axis=f"net KL, {KL_UNIT} (logarithmic)",
        note="Rows are named by cell, protocol and variance_ratio. Net KL is KL less the engine's own noise "
        "floor. The axis is logarithmic; an arrow at its left end stands for a value that is not above zero.",
    )


def cell_name(line: dict) -> str:
    """A cell's name on the axis: what is coded, where, at which ratio if it has one."""
    parts = [line["label"], line["protocol"]]
    if line["variance_ratio"] is not None:
        parts.append(fmt.plain(line["variance_ratio"]))
    return ", ".join(parts)


def cell_words(line: dict) -> list[str]:
    """What a cell's mark says."""
    return [
        cell_name(line),
        f"{line['engine']}, {line['dtype']}",
        marks.quantity("net KL", line),
        f"{fmt.number(line['bits_per_value'])} bits per value",
        marks.basis(line),
        f"cell {line['cell_id']}",
    ]
