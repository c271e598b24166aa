"""The report's figures by name, and the one place that writes them.

A figure is a pair of functions of its study: one takes the table out of ``metrics.json``, the other describes what
is drawn of exactly that table, so the CSV, the picture and the page cannot differ.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from kvlab.core.errors import Fault, UnknownName
from kvlab.core.records import atomic
from kvlab_pipeline.rendering import figure, svg
from kvlab_pipeline.studies.chapter import Drawn
from kvlab_pipeline.studies.register import chapters

NOT_MEASURED = "Not drawn: this run did not measure it."


FIGURES: dict[str, Drawn] = {name: drawn for chapter in chapters().values() for name, drawn in chapter.figures.items()}


def write(name: str, metrics: dict, folder: Path, otherwise: str = NOT_MEASURED) -> bool:
    """Write ``NAME.svg`` and ``NAME.csv`` into `folder`; both are always there afterwards.

    Where there is nothing to draw, the picture is the sentence `otherwise` and the CSV holds it in its
    one column ``not_drawn``, so an older picture cannot be taken for this run's.

    Returns
    -------
    bool
        Whether numbers were drawn.

    Raises
    ------
    UnknownName
        When there is no figure of that name.
    """
    if name not in FIGURES:
        raise UnknownName("figure", name, FIGURES)
    table = FIGURES[name].table(metrics)
    there = table is not None and not table.is_empty()
    if not there:
        table = pl.DataFrame({"not_drawn": [otherwise]})
    with atomic(folder / f"{name}.csv") as temporary:
        table.write_csv(temporary)
    with atomic(folder / f"{name}.svg") as temporary:
        picture(name if there else None, table, temporary)
    return there


def drawable(name: str, metrics: dict) -> bool:
    """Whether the metrics hold anything for this figure to draw."""
    table = FIGURES[name].table(metrics)
    return table is not None and not table.is_empty()


def described(name: str, table: pl.DataFrame) -> figure.Figure:
    """What is drawn of a figure's table.

    Raises
    ------
    Fault
        When a row of the table is not exactly one mark: a number could not be seen, or would be seen twice.
    """
    found = FIGURES[name].describe(table)
    rows = sorted(mark.row for mark in found.marks)
    if rows != list(range(len(table))):
        raise Fault(f"the figure {name!r} draws rows {rows} of a table of {len(table)}", code="fault.other-rows")
    return found


def picture(name: str | None, table: pl.DataFrame, path: Path) -> None:
    """Draw a figure's table as SVG; without a name the sentence that the table holds."""
    if name:
        svg.write(described(name, table), path)
    else:
        svg.sentence(table["not_drawn"][0], path)
