"""From the rows of a figure's table to its marks: their words, their looks, and the figure that most studies draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import polars as pl

from kvlab.output import format as fmt
from kvlab_pipeline.rendering.figure import (
    Figure,
    LegendKey,
    Look,
    Mark,
    Panel,
    beside,
    colour_of,
    log_axis,
    named_axis,
    shape_of,
)
from kvlab_pipeline.rendering.parts import KL_UNIT

NUMBERS = ("value", "low", "high")


def interval(given: dict) -> dict:
    """An Estimate's three numbers as floats and what they rest on, for a table's row."""
    return {key: float(given[key]) for key in NUMBERS} | {key: int(given[key]) for key in ("n_windows", "n_tokens")}


def numbered(table: pl.DataFrame) -> list[dict]:
    """The rows of a table, each with its number under ``row``."""
    return [line | {"row": row} for row, line in enumerate(table.iter_rows(named=True))]


def each(lines: Sequence[dict], *keys: str) -> list[list]:
    """The values of some columns, each value once, in the order of the table."""
    return [list(dict.fromkeys(line[key] for line in lines)) for key in keys]


def mark(line: dict, at: float, words: Sequence[str], look: Look, **more) -> Mark:
    """The mark of a numbered row."""
    return Mark(line["row"], at, *(line[key] for key in NUMBERS), tuple(words), look, **more)


def basis(line: dict, what: str = "scored") -> str:
    """What a number rests on."""
    return f"{fmt.number(line['n_windows'])} windows, {fmt.number(line['n_tokens'])} {what} tokens"


def quantity(name: str, line: dict, prefix: str = "", unit: str = KL_UNIT) -> str:
    """A number with its interval and unit."""
    given = {key: line[prefix + key] for key in NUMBERS}
    return f"{name} {fmt.estimate(given)} {unit}".rstrip()


def engine_look(engines: Sequence[str], engine: str, **more) -> Look:
    """Colour and shape of an engine's dots; colour alone would not tell them apart for everybody."""
    return Look(colour_of(engine), shape_of(list(engines).index(engine)), **more)


def by_row(
    table: pl.DataFrame,
    name: Callable[[dict], str],
    words: Callable[[dict], Sequence[str]],
    title: str,
    axis: str,
    note: str,
    labelled: bool = False,
) -> Figure:
    """Dots with intervals on a logarithmic axis, a row per name; engines on the same row stand beside each other.

    Parameters
    ----------
    table : polars.DataFrame
        At least ``engine``, ``value``, ``low``, ``high``, ``n_windows`` and ``n_tokens``.
    name, words : callable
        A row's name on the axis, and what its mark says.
    title, axis, note : str
        What is to be seen, what the axis shows with its unit, and how the marks are to be read.
    labelled : bool
        Whether every number is written beside its mark.
    """
    lines = numbered(table)
    names = list(dict.fromkeys(map(name, lines)))
    (engines,) = each(lines, "engine")
    shared = len(names) < len(lines)

    def placed(line: dict) -> Mark:
        shift = beside(engines.index(line["engine"]), len(engines), 0.5) if shared else 0.0
        label = fmt.estimate(line) if labelled or line["value"] <= 0 else ""
        return mark(
            line, names.index(name(line)) + shift, words(line), engine_look(engines, line["engine"]), label=label
        )

    values = log_axis(lines, axis, labelled or any(line["value"] <= 0 for line in lines))
    panel = Panel(named_axis(names), values, tuple(map(placed, lines)), across=True)
    keys = [LegendKey(engine, engine_look(engines, engine)) for engine in engines] if len(engines) > 1 else []
    return Figure(title, note, (panel,), keys=tuple(keys), height=30 if shared else 25)
