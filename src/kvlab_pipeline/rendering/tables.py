"""The one description of a table: its rows, and for each heading how a row is told under it.

A column is a function of a row. Those that only print a field are made here, by the field's name, of rows that are
dicts (of ``metrics.json``) or records of a study alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvlab.output import format as fmt
from kvlab_pipeline.rendering.parts import reading, resolution

Column = Callable[[Any], str]


def table(rows: Iterable[Any], columns: Mapping[str, Column]) -> str:
    """A Markdown table with a line for each row; see `kvlab.output.format.table`."""
    return fmt.table(list(columns), [[tell(row) for tell in columns.values()] for row in rows])


def table_if_any(rows: Iterable[Any], columns: Mapping[str, Column]) -> str | None:
    """The same; None without rows."""
    rows = list(rows)
    return table(rows, columns) if rows else None


def field(row: Any, name: str) -> Any:
    """A field of a dict or of a record; those by fixed keys are named by their path."""
    for part in name.split("."):
        row = row[part] if isinstance(row, Mapping) else getattr(row, part)
    return row


def text(name: str) -> Column:
    """A field as it is; a dash for none."""
    return lambda row: fmt.DASH if (value := field(row, name)) is None else str(value)


def code(name: str) -> Column:
    """A name as code; a dash for none."""
    return lambda row: fmt.DASH if (value := field(row, name)) is None else f"`{value}`"


def number(name: str, digits: int = 3) -> Column:
    """A number without an interval; a count in whole."""
    return lambda row: fmt.number(field(row, name), digits)


def plain(name: str) -> Column:
    """A setting, as short as it was given."""
    return lambda row: fmt.plain(field(row, name))


def stream(name: str = "stream") -> Column:
    """K or V."""
    return lambda row: field(row, name).upper()


def estimate(name: str, scale: float = 1.0, shift: float = 0.0, signed: bool = False) -> Column:
    """A number with its interval, see `kvlab.output.format.estimate`."""
    return lambda row: fmt.estimate(field(row, name), scale, shift, signed)


def percent(name: str, signed: bool = False) -> Column:
    """A share or a rate with its interval, in per cent."""
    return estimate(name, 100, signed=signed)


def change(name: str, signed: bool = False) -> Column:
    """A ratio with its interval as a change in per cent."""
    return estimate(name, 100, 1, signed)


def effect(name: str) -> Column:
    """Whether an effect is told from zero; a dash where there is none."""
    return lambda row: reading(resolution(given)) if (given := field(row, name)) else fmt.DASH
