"""Rows of a table as text: for people, for programs, for spreadsheets."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence

from kvlab.core.errors import NonFinite

FORMATS = ("table", "json", "csv")
NOTHING = "–"  # a cell without a value
WIDEST = 100  # characters of a cell that people read

# A database of others may hold anything: none of it may move the cursor, break a line, turn the writing around or be
# no character of XML.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def as_text(rows: Sequence[Mapping], columns: Sequence[str], form: str) -> str:
    """Rows in one of `FORMATS`, without a newline at the end.

    JSON and CSV hold every column and every value as it is; in CSV what a row does not say is an empty field. The
    table for people leaves out columns that say nothing, and shortens long cells.

    Raises
    ------
    NonFinite
        A number is NaN or infinite, which JSON does not have.
    """
    return {"table": _table, "json": _json, "csv": _csv}[form](rows, columns)


def all_there_are(count: int, most: int) -> str:
    """Said of windows where a text has fewer than are taken otherwise."""
    return f", all that it has (of a longer text: {most})" if count < most else ""


def as_json(value: object) -> str:
    """Indented JSON; NaN and infinity are refused."""
    try:
        return json.dumps(value, indent=2, allow_nan=False)
    except ValueError:
        raise NonFinite("the answer holds NaN or infinity, which is no number of JSON") from None


def printable(value: object) -> str:
    """A value on one line; characters that are no text are replaced."""
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(value))


def _json(rows: Sequence[Mapping], columns: Sequence[str]) -> str:
    return as_json([{name: row[name] for name in columns} for row in rows])


def _csv(rows: Sequence[Mapping], columns: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().removesuffix("\n")


def _table(rows: Sequence[Mapping], columns: Sequence[str]) -> str:
    said = [name for name in columns if any(row[name] not in (None, "") for row in rows)]
    if not said:
        return "no rows"
    lines = [said, *([_cell(row[name]) for name in said] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cell(value: object) -> str:
    if value is None or value == "":
        return NOTHING
    text = f"{value:.6g}" if isinstance(value, float) else printable(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"
