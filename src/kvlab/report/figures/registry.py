"""The figures by name, and the one place that writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from kvlab.errors import UnknownName
from kvlab.records import atomic
from kvlab.report.figures.baseline import baseline, baseline_table
from kvlab.report.figures.canvas import save, sentence
from kvlab.report.figures.cells import cells, cells_table
from kvlab.report.figures.gap_shapley import gap_shapley, gap_shapley_table
from kvlab.report.figures.interactive.baseline import interactive_baseline
from kvlab.report.figures.interactive.cells import interactive_cells
from kvlab.report.figures.interactive.gap_shapley import interactive_gap_shapley
from kvlab.report.figures.interactive.layers import interactive_layers
from kvlab.report.figures.interactive.mitigations import interactive_mitigations
from kvlab.report.figures.interactive.noise import interactive_noise
from kvlab.report.figures.interactive.residual import interactive_d_eff, interactive_residual
from kvlab.report.figures.layers import layers, layers_table
from kvlab.report.figures.mitigations import mitigations, mitigations_table
from kvlab.report.figures.noise import noise, noise_table
from kvlab.report.figures.residual import d_eff, d_eff_table, residual, residual_table

NOT_MEASURED = "Not drawn: this run did not measure it."


@dataclass(frozen=True)
class Figure:
    """A figure: what takes its table out of ``metrics.json``, and the two that draw exactly that table.

    Parameters
    ----------
    table : callable
        ``metrics -> polars.DataFrame``, one row per drawn number; None or empty when there is nothing.
    draw : callable
        ``table -> matplotlib Figure``: the SVG beside FINDINGS.md.
    interactive : callable
        ``table -> plotly Figure``: the same in ``report.html``; see `kvlab.report.figures.interactive`.
    """

    table: Callable
    draw: Callable
    interactive: Callable


FIGURES: dict[str, Figure] = {
    "gap_shapley": Figure(gap_shapley_table, gap_shapley, interactive_gap_shapley),
    "baseline": Figure(baseline_table, baseline, interactive_baseline),
    "cells": Figure(cells_table, cells, interactive_cells),
    "layers": Figure(layers_table, layers, interactive_layers),
    "noise": Figure(noise_table, noise, interactive_noise),
    "residual": Figure(residual_table, residual, interactive_residual),
    "d_eff": Figure(d_eff_table, d_eff, interactive_d_eff),
    "mitigations": Figure(mitigations_table, mitigations, interactive_mitigations),
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


def picture(name: str | None, table: pl.DataFrame, path: Path) -> None:
    """Draw a figure's table as SVG; without a name the sentence that the table holds."""
    save((FIGURES[name].draw if name else sentence)(table), path)
