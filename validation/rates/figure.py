"""The curves: KL over bits, a panel a text, a line a codec. Torch-free."""

from __future__ import annotations

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks
from kvlab_pipeline.rendering.figure import (
    DOWN,
    GREY,
    INK,
    OTHER,
    UP,
    Axis,
    Figure,
    LegendKey,
    Line,
    Look,
    Panel,
    log_axis,
    shape_of,
)
from kvlab_pipeline.rendering.parts import KL_UNIT
from validation.rates import compare

TEXTS = {"other": "encyclopedia, not the calibration's kind", "test": "docstrings, the calibration's kind"}
COLOURS = {"klt": UP, "archive": DOWN}
RIVAL_COLOURS = (GREY, INK, OTHER)


def figure(one: dict) -> Figure:
    """KL, logarithmic, over bits per value: a panel a text, a line a codec; `klt` and `archive` in colour."""
    table = pl.DataFrame(
        [
            {key: row[key] for key in ("text", "label", "codec", "bits")} | marks.interval(compare.kl(row).to_json())
            for row in one["rows"]
        ]
    )
    lines = marks.numbered(table)
    texts, codecs = marks.each(lines, "text", "codec")
    places = Axis((0.0, table["bits"].max() + 0.4), "bits per value, all that is written for coded tokens")
    values = log_axis(lines, f"KL, {KL_UNIT} (logarithmic)")
    panels = tuple(panel([line for line in lines if line["text"] == text], codecs, places, values) for text in texts)
    return Figure(
        f"What codecs cost {one['model']} at the bits that they take ({one['protocol']})",
        "Left and down is better. A line joins the settings of one codec.",
        panels,
        columns=2,
        keys=tuple(LegendKey(one, look(codecs, one), Line((), (), look(codecs, one).colour, 1.0)) for one in codecs),
        height=300,
    )


def panel(lines: list[dict], codecs: list[str], places: Axis, values: Axis) -> Panel:
    """One text."""
    drawn = tuple(marks.mark(line, line["bits"], words(line), look(codecs, line["codec"])) for line in lines)
    curves = tuple(curve for codec in codecs if (curve := line_of(lines, codecs, codec)))
    return Panel(places, values, drawn, curves, title=TEXTS[lines[0]["text"]])


def line_of(lines: list[dict], codecs: list[str], codec: str) -> Line | None:
    """A line through a codec's points."""
    mine = [line for line in lines if line["codec"] == codec and line["value"] > 0]
    mine.sort(key=lambda line: line["bits"])
    points = (tuple(line[key] for line in mine) for key in ("bits", "value"))
    return Line(*points, look(codecs, codec).colour, 2.0 if codec in COLOURS else 1.0) if len(mine) > 1 else None


def look(codecs: list[str], codec: str) -> Look:
    """Colour and shape of a codec; rivals' go round at different paces."""
    order = codecs.index(codec)
    return Look(COLOURS.get(codec, RIVAL_COLOURS[order % len(RIVAL_COLOURS)]), shape_of(order))


def words(line: dict) -> list[str]:
    """What a mark says."""
    return [
        line["label"],
        TEXTS[line["text"]],
        marks.quantity("KL", line),
        f"{fmt.number(line['bits'])} bits per value",
        marks.basis(line),
    ]
