"""Interactive: how the gap between two corners divides among the factors."""

from __future__ import annotations

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import DOWN, GREY, INK, UP
from kvlab.report.figures.interactive import marks
from kvlab.report.tables import parts as tables

ROW, HEAD = 62, 90  # pixels


def interactive_gap_shapley(table: pl.DataFrame):
    """Bars from the low corner to the high one, factor by factor, end to end, each with its interval."""
    lines = marks.numbered(table)
    texts = fmt.column(lines)
    names = [f"{marks.escaped(line['name'])}<br>{text}" for line, text in zip(lines, texts, strict=True)]
    rows = marks.axis(
        range=[len(lines) - 0.4, -0.6],
        tickvals=list(range(len(lines))),
        ticktext=names,
        showgrid=False,
        zeroline=False,
        ticklen=0,
    )
    across = marks.axis(f"KL, {tables.KL_UNIT}", zeroline=True, showgrid=True, rangemode="tozero")
    note = (
        "Each factor's bar begins where the last one ended; the thin line is its interval. A hatched bar is not "
        "told from zero. KL is taken to the engine's own uncompressed output."
    )
    meta = {"named_rows": len(lines)}
    traces = [connector(lines), bars(lines)]
    return marks.figure(traces, HEAD + ROW * len(lines), note, xaxis=across, yaxis=rows, bargap=0.44, meta=meta)


def bars(lines: list[dict]) -> dict:
    """All bars as one trace."""
    _, whiskers = marks.whiskers(lines, INK)
    return marks.points(
        lines,
        words,
        kind="bar",
        orientation="h",
        base=[line["start"] for line in lines],
        x=[line["value"] for line in lines],
        y=[line["row"] for line in lines],
        error_x=whiskers,
        marker={
            "color": [colour(line) for line in lines],
            "line": {"color": [colour(line) for line in lines], "width": 1},
            "pattern": {
                "shape": ["" if clear(line) else "/" for line in lines],
                "fillmode": "replace",
                "size": 6,
            },
        },
    )


def connector(lines: list[dict]) -> dict:
    """Thin lines that carry each bar's end to the next bar's start."""
    x, y = [], []
    for line in lines[:-1]:
        end = line["start"] + line["value"]
        x += [end, end, None]
        y += [line["row"] + 0.28, line["row"] + 0.72, None]
    return marks.guide(x=x, y=y, line={"color": GREY, "width": 1})


def words(line: dict) -> list[str]:
    """A bar's hover text."""
    what = "KL of this corner" if line["kind"] == "corner" else "share of the gap"
    left = [] if clear(line) else ["not told from zero"]
    return [line["name"], marks.quantity(what, line), *left, marks.basis(line)]


def clear(line: dict) -> bool:
    """Whether a bar is drawn solid."""
    return line["kind"] == "corner" or not fmt.contains_zero(line)


def colour(line: dict) -> str:
    """Grey corners; what adds to the gap in one colour, what takes from it in another."""
    return GREY if line["kind"] == "corner" else UP if line["value"] > 0 else DOWN
