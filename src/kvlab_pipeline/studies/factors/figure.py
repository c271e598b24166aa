"""How the gap between two corners divides among the factors: a bar per factor, end to end."""

from __future__ import annotations

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.pages import marks
from kvlab_pipeline.pages.figure import DOWN, GREY, UP, Figure, Line, Look, Mark, Panel, linear_axis, named_axis
from kvlab_pipeline.pages.parts import KL_UNIT
from kvlab_pipeline.pages.withheld import undecided
from kvlab_pipeline.studies.factors.tables import ENGINE

HELD = "held"


def gap_shapley_table(metrics: dict) -> pl.DataFrame | None:
    """Low corner, each factor's share, high corner, of KL; `start` is where a bar begins.

    Where it is open whether the engines agree, the share of the engine is of the kind ``held``.
    """
    held = undecided(metrics) is not None
    gap = metrics.get("gap")
    measure = gap and gap["measures"].get("kl")
    if not measure or not measure["parts"]:
        return None
    rows = [bar(corner_name(gap["low"]), "corner", 0.0, measure["low"])]
    start = measure["low"]["value"]
    for part in sorted(measure["parts"], key=lambda part: -abs(part["share"]["value"])):
        kind = HELD if held and part["factor"] == ENGINE else "share"
        rows.append(bar(part["factor"], kind, start, part["share"]))
        start += part["share"]["value"]
    rows.append(bar(corner_name(gap["high"]), "corner", 0.0, measure["high"]))
    return pl.DataFrame(rows)


def gap_shapley(table: pl.DataFrame) -> Figure:
    """From the low corner to the high one, factor by factor, each with its interval."""
    lines = marks.numbered(table)
    texts = fmt.column(lines)
    drawn = tuple(bar_mark(line, text) for line, text in zip(lines, texts, strict=True))
    ends = [line["start"] + line[key] for line in lines for key in ("value", "low", "high")]
    names = named_axis(wrapped(line["name"]) + ("" if clear(line) else f"\n({left_open(line)})") for line in lines)
    values = linear_axis(ends, f"KL to the engine's own uncompressed output, {KL_UNIT}", labelled=True)
    return Figure(
        "How the gap between the two corners divides among the factors",
        "Each factor's bar begins where the last one ended; the thin line is its interval. A hatched bar is not "
        "told from zero, or is laid to the engines while it is open whether they agree. KL is taken to the engine's "
        "own uncompressed output.",
        (Panel(names, values, drawn, connectors(lines), across=True),),
        height=32,
    )


def bar_mark(line: dict, text: str) -> Mark:
    """One bar: grey corners; what adds to the gap in one colour, what takes from it in another."""
    colour = GREY if line["kind"] == "corner" else UP if line["value"] > 0 else DOWN
    look = Look(colour, open=not clear(line), hatched=not clear(line))
    return marks.mark(line, line["row"], words(line), look, bar=0.56, start=line["start"], label=text)


def connectors(lines: list[dict]) -> tuple[Line, ...]:
    """Thin lines that carry each bar's end to the next bar's start."""
    ends = [(line["row"], line["start"] + line["value"]) for line in lines[:-1]]
    return tuple(Line((row + 0.28, row + 0.72), (end, end)) for row, end in ends)


def words(line: dict) -> list[str]:
    """What a bar says."""
    what = "KL of this corner" if line["kind"] == "corner" else "share of the gap"
    left = [] if clear(line) else [left_open(line)]
    return [line["name"], marks.quantity(what, line), *left, marks.basis(line)]


def clear(line: dict) -> bool:
    """Whether a bar is drawn solid."""
    return line["kind"] == "corner" or (line["kind"] != HELD and not fmt.contains_zero(line))


def left_open(line: dict) -> str:
    """Why a bar is not drawn solid."""
    return "engines: open" if line["kind"] == HELD else "not resolved"


def bar(name: str, kind: str, start: float, given: dict) -> dict:
    """One bar of the decomposition; all numbers in nats per token."""
    return {"name": name, "kind": kind, "start": float(start)} | marks.interval(given)


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
