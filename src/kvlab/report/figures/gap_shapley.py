"""How the gap between two corners divides among the factors: a bar per factor, end to end."""

from __future__ import annotations

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import DOWN, GREY, INK, UP, canvas, interval, styled, title


def gap_shapley_table(metrics: dict) -> pl.DataFrame | None:
    """Low corner, each factor's share, high corner, of KL; `start` is where a bar begins."""
    gap = metrics.get("gap")
    measure = gap and gap["measures"].get("kl")
    if not measure or not measure["parts"]:
        return None
    rows = [bar(corner_name(gap["low"]), "corner", 0.0, measure["low"])]
    start = measure["low"]["value"]
    for part in sorted(measure["parts"], key=lambda part: -abs(part["share"]["value"])):
        rows.append(bar(part["factor"], "share", start, part["share"]))
        start += part["share"]["value"]
    rows.append(bar(corner_name(gap["high"]), "corner", 0.0, measure["high"]))
    return pl.DataFrame(rows)


@styled
def gap_shapley(table: pl.DataFrame):
    """From the low corner to the high one, factor by factor, each with its interval."""
    figure, (axis,) = canvas(height=1.15 + 0.42 * len(table))
    texts = fmt.column(table.to_dicts(), signed=False)
    names, ends = [], [0.0]
    for row, (line, text) in enumerate(zip(table.iter_rows(named=True), texts, strict=True)):
        clear = line["kind"] == "corner" or not fmt.contains_zero(line)
        colour = GREY if line["kind"] == "corner" else UP if line["value"] > 0 else DOWN
        reach = waterfall_bar(axis, row, line, colour, clear)
        axis.text(max(reach), row, "  " + text, va="center", ha="left")
        names.append(wrapped(line["name"]) + ("" if clear else "\n(not resolved)"))
        ends += reach
    connect(axis, table)
    axis.set_yticks(range(len(table)), names)
    axis.invert_yaxis()
    axis.axvline(0, color=GREY, linewidth=0.8)
    room = (max(ends) - min(ends)) or 1.0
    axis.set_xlim(min(ends) - 0.02 * room, max(ends) + 0.55 * room)
    axis.set_xlabel("KL to the engine's own uncompressed output, nats per token")
    title(figure, "How the gap between the two corners divides among the factors")
    return figure


def waterfall_bar(axis, row: int, line: dict, colour: str, clear: bool) -> list[float]:
    """A bar from where the last one ended, hatched when not clear of zero; returns the x it touches."""
    axis.barh(
        row,
        line["value"],
        left=line["start"],
        height=0.56,
        color=colour if clear else "white",
        edgecolor=colour,
        hatch=None if clear else "////",
        linewidth=0.8,
    )
    low, high = line["start"] + line["low"], line["start"] + line["high"]
    axis.plot([low, high], [row, row], color=INK, linewidth=1.3, solid_capstyle="butt")
    return [low, high, line["start"], line["start"] + line["value"]]


def connect(axis, table: pl.DataFrame) -> None:
    """Thin lines that carry each bar's end to the next bar's start."""
    level = table["value"][0]
    for row, line in enumerate(table.iter_rows(named=True)):
        if row == len(table) - 1:
            break
        level = line["start"] + line["value"]
        axis.plot([level, level], [row + 0.28, row + 0.72], color=GREY, linewidth=0.8)


def bar(name: str, kind: str, start: float, given: dict) -> dict:
    """One bar of the decomposition; all numbers in nats per token."""
    return {"name": name, "kind": kind, "start": float(start)} | interval(given)


def corner_name(corner: dict) -> str:
    """A corner of the decomposition in words; ratios by their own name."""
    words = [
        f"{key} {fmt.plain(value)}" if isinstance(value, float | int) else str(value) for key, value in corner.items()
    ]
    return ", ".join(words)


def wrapped(name: str) -> str:
    """A corner's long name on two lines."""
    head, comma, tail = name.rpartition(", ")
    return f"{head},\n{tail}" if comma else name
