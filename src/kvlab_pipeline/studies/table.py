"""Tables of a study as a page prints them. Torch-free; a record holds numbers, a table strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.core.errors import Fault
from kvlab.output import format as fmt


@dataclass(frozen=True)
class Table:
    """One table.

    Parameters
    ----------
    title : str
        A heading.
    text : str
        What is to be known before the table, Markdown; may be empty.
    header : tuple of str
    rows : tuple of tuple of str
        As long as the header, each of them.

    Raises
    ------
    Fault
        When a row is longer or shorter than the header.
    """

    title: str
    text: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.header)]
        if wrong:
            raise Fault(
                f"a row of {self.title!r} has {len(wrong[0])} cells under {len(self.header)} headings: {wrong}",
                code="fault.ragged-table",
            )


def spread(values: Sequence[float], digits: int = 3) -> tuple[str, str, str]:
    """The least, the median and the greatest of some numbers; three dashes when there are none."""
    if not values:
        return fmt.DASH, fmt.DASH, fmt.DASH
    ordered, n = sorted(values), len(values)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return fmt.number(ordered[0], digits), fmt.number(middle, digits), fmt.number(ordered[-1], digits)
