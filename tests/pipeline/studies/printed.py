"""The cells of a table as a page prints it."""

from __future__ import annotations


def rows(table: str) -> list[tuple[str, ...]]:
    """What stands under the headings of a Markdown table."""
    return [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in table.splitlines()[2:]]
