"""The detection curve as a table and as a picture: how often a planted loss is certified, and how often it is found."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import svg
from kvlab_pipeline.rendering.figure import (
    DOWN,
    GREY,
    OTHER,
    UP,
    Axis,
    Figure,
    LegendKey,
    Line,
    Look,
    Mark,
    Panel,
    shape_of,
)

COLOURS = (GREY, OTHER, DOWN, UP)
NONE = "No eval is registered that losses are planted in."
COLUMNS = pl.Schema(
    {name: pl.Float64 for name in ("base_rate", "churn", "loss")}
    | {"n_items": pl.Int64}
    | {word: pl.Float64 for word in ("within", "open", "beyond")}
)
PANELS = {"within": "certified", "beyond": "found to lose too much"}


def table(curve: list[dict]) -> pl.DataFrame:
    """One row per baseline, loss and number of items, with the share of repeats in which each word was given."""
    return pl.DataFrame(curve, schema=COLUMNS)


def picture(table: pl.DataFrame, path: Path) -> None:
    """Draw the table as SVG; an empty one as a sentence."""
    if table.is_empty():
        svg.sentence(NONE, path)
    else:
        svg.write(figure(table), path)


def figure(table: pl.DataFrame) -> Figure:
    """Both shares against the number of items, a line for each planted loss; of the first baseline of the table."""
    table = table.with_row_index("row").filter(pl.col("base_rate") == table["base_rate"][0])
    losses, sizes = (table[key].unique(maintain_order=True).to_list() for key in ("loss", "n_items"))
    places = Axis((min(sizes) / 1.3, max(sizes) * 1.3), "items", log=True, ticks=tuple(sizes), form="whole")
    values = Axis((-0.03, 1.03), "share of repeats")
    lines = table.sort("n_items").to_dicts()
    looks = {loss: Look(COLOURS[at % len(COLOURS)], shape_of(at), 0.85) for at, loss in enumerate(losses)}
    panels = []
    for word, words in PANELS.items():
        drawn = tuple(share(line, word, looks[line["loss"]]) for line in lines)
        curves = tuple(
            curve([line for line in lines if line["loss"] == loss], word, look.colour) for loss, look in looks.items()
        )
        panels.append(Panel(places, values, drawn, curves, title=words))
    return Figure(
        "What the gate says of planted losses",
        "Share of repeats in which a planted loss is certified, and in which it is found, by the number of items.",
        tuple(panels),
        columns=len(PANELS),
        keys=tuple(
            LegendKey(f"loses {fmt.percent(loss)}", look, curve([], "", look.colour)) for loss, look in looks.items()
        ),
    )


def share(line: dict, word: str, look: Look) -> Mark:
    """How often a word was given at one loss and number of items."""
    said = f"{PANELS[word]} in {fmt.percent(line[word])} of the repeats"
    words = (f"loses {fmt.percent(line['loss'])}", f"{fmt.number(line['n_items'])} items", said)
    return Mark(line["row"], line["n_items"], line[word], line[word], line[word], words, look)


def curve(lines: list[dict], word: str, colour: str) -> Line:
    """A line through one loss's shares."""
    return Line(tuple(line["n_items"] for line in lines), tuple(line[word] for line in lines), colour, 1.4)
