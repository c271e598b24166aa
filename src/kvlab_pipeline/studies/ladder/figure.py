"""What every codec costs at the bits that it stores."""

from __future__ import annotations

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.pages import marks
from kvlab_pipeline.pages.figure import (
    DOWN,
    GREY,
    INK,
    OTHER,
    UP,
    Axis,
    Figure,
    Key,
    Line,
    Look,
    Panel,
    log_axis,
    shape_of,
)
from kvlab_pipeline.pages.parts import KL_UNIT
from kvlab_pipeline.studies.ladder.tables import TEXTS, plain_rows

COLOURS = (UP, DOWN, OTHER, INK, GREY)


def ladder_table(metrics: dict) -> pl.DataFrame | None:
    """One row per rung and text: bits per value and KL; `series` is the rung without its bits."""
    rows = [
        {"text": row["text"], "label": row["label"], "series": series_of(row["label"])}
        | {"bits_per_value": float(row["bits_per_value"]), "cell_id": row["cell_id"]}
        | marks.interval(row["kl"])
        for row in plain_rows(metrics)
    ]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def series_of(label: str) -> str:
    """A rung's name without the bits at its end."""
    name, _, bits = label.rpartition(" ")
    return name if bits.replace(".", "", 1).isdigit() else label


def ladder(table: pl.DataFrame) -> Figure:
    """KL, logarithmic, over bits per value: a panel per text, a line per codec."""
    lines = marks.numbered(table)
    texts, series = marks.each(lines, "text", "series")
    bits = table["bits_per_value"]
    places = Axis(
        (max(0.0, bits.min() - 0.4), bits.max() + 0.4), "bits per value, all that is written for coded tokens"
    )
    values = log_axis(lines, f"KL, {KL_UNIT} (logarithmic)")
    panels = tuple(panel([line for line in lines if line["text"] == text], series, places, values) for text in texts)
    return Figure(
        "What every codec costs at the bits that it stores",
        "Left and down is better. A line joins the settings of one codec. The calibration and the tokens after"
        " the context come on top, see the table of bits at so many tokens. An arrow at the lower end stands for a"
        " value that is not above zero.",
        panels,
        columns=2,
        keys=tuple(Key(one, look(series, one), Line((), (), look(series, one).colour, 1.0)) for one in series),
        height=260,
    )


def panel(lines: list[dict], series: list[str], places: Axis, values: Axis) -> Panel:
    """One text."""
    drawn = tuple(marks.mark(line, line["bits_per_value"], words(line), look(series, line["series"])) for line in lines)
    return Panel(places, values, drawn, tuple(curves(lines, series)), title=TEXTS[lines[0]["text"]])


def curves(lines: list[dict], series: list[str]) -> list[Line]:
    """A line through each codec's rungs, by their bits."""
    found = []
    for one in series:
        mine = sorted(
            (line for line in lines if line["series"] == one and line["value"] > 0),
            key=lambda line: line["bits_per_value"],
        )
        if len(mine) > 1:
            points = (tuple(line[key] for line in mine) for key in ("bits_per_value", "value"))
            found.append(Line(*points, look(series, one).colour, 1.0))
    return found


def look(series: list[str], one: str) -> Look:
    """Colour and shape of a codec; the two go round at different paces, so that twenty can be told apart."""
    order = series.index(one)
    return Look(COLOURS[order % len(COLOURS)], shape_of(order))


def words(line: dict) -> list[str]:
    """What a rung's mark says."""
    return [
        line["label"],
        TEXTS[line["text"]],
        marks.quantity("KL", line),
        f"{fmt.number(line['bits_per_value'])} bits per value",
        marks.basis(line),
        f"cell {line['cell_id']}",
    ]
