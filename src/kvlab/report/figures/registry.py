"""The figures by name, and the one place that writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl

from kvlab.errors import UnknownName
from kvlab.records import atomic
from kvlab.report.figures.baseline import baseline, baseline_table
from kvlab.report.figures.canvas import save, sentence
from kvlab.report.figures.cells import cells, cells_table
from kvlab.report.figures.gap_shapley import gap_shapley, gap_shapley_table
from kvlab.report.figures.layers import layers, layers_table
from kvlab.report.figures.noise import noise, noise_table

NOT_MEASURED = "Not drawn: this run did not measure it."
# By name: what takes the table out of metrics.json, and what draws exactly that table.
FIGURES: dict[str, tuple[Callable, Callable]] = {
    "gap_shapley": (gap_shapley_table, gap_shapley),
    "baseline": (baseline_table, baseline),
    "cells": (cells_table, cells),
    "layers": (layers_table, layers),
    "noise": (noise_table, noise),
}


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
    table = FIGURES[name][0](metrics)
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
    table = FIGURES[name][0](metrics)
    return table is not None and not table.is_empty()


def picture(name: str | None, table: pl.DataFrame, path: Path) -> None:
    """Draw a figure's table as SVG; without a name the sentence that the table holds."""
    save((FIGURES[name][1] if name else sentence)(table), path)
