"""What the cases on a model stand on: the engine, and the windows that they run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from kvlab.core.recipe import Cell, Recipe
from kvlab.engines.base import Engine
from kvlab.measure.coding import Coder
from kvlab.measure.scoring import WindowRun
from kvlab.stats.bootstrap import Column
from kvlab.text.corpus import TokenWindows

CONTEXT, EVAL = 128, 64  # tokens: the windows are cut to their beginnings, so that a study takes minutes
MEASURED, EXACT = 16, 4  # windows: of what has an interval, of what has to be met exactly


@dataclass(frozen=True)
class Ground:
    """An engine in float32 and the beginnings of its windows.

    Parameters
    ----------
    engine : Engine
    test, calib : list of list of int
        Token ids of the scored and of the calibration windows.
    context : int
        Tokens of a window that are coded.
    """

    engine: Engine
    test: list[list[int]]
    calib: list[list[int]]
    context: int

    @classmethod
    def of(cls, engine: Engine, windows: TokenWindows) -> Ground:
        """The beginnings of at most `MEASURED` windows of each split."""
        context, evaluated = min(CONTEXT, windows.context), min(EVAL, windows.eval)
        test, calib = (split[:MEASURED, : context + evaluated].tolist() for split in (windows.test, windows.calib))
        return cls(engine, test, calib, context)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers."""
        return tuple(range(self.engine.info.n_layers))

    def run(self, window: int, engine: Engine | None = None) -> WindowRun:
        """The clean pass of one scored window, on another engine if one is given."""
        return WindowRun(engine or self.engine, self.test[window], self.context, window)

    def cell(self, label: str, recipe: Recipe, **changes) -> Cell:
        """A cell on K and V of all layers, inside the one forward."""
        settings = {
            "study": "cells",
            "engine": "hf",
            "dtype": "float32",
            "protocol": "in_forward",
            "origin": "hf",
            "stream": "kv",
            "layers": self.layers,
            "windows": len(self.test),
        }
        return Cell(label=label, recipe=recipe, **settings | changes)


def measured(ground: Ground, coders: dict[str, Coder], windows: int, engine: Engine | None = None) -> pl.DataFrame:
    """Token rows of several coders' cells; their cell_id is the coder's name here."""
    rows = []
    for window in range(min(windows, len(ground.test))):
        run = ground.run(window, engine)
        rows += [run.measured(coder.cell, coder, name) for name, coder in coders.items()]
    return pl.concat(rows)


def column(rows: pl.DataFrame, name: str, quantity: str = "kl") -> Column:
    """One quantity of the rows of one name."""
    rows = rows.filter(pl.col("cell_id") == name)
    return Column.of(rows["window"].to_numpy(), rows["position"].to_numpy(), rows[quantity].to_numpy())


def window_column(values: list[float] | np.ndarray) -> Column:
    """One number per window."""
    return Column.of(np.arange(len(values)), np.zeros(len(values), dtype=int), np.asarray(values))
