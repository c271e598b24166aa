"""Every codec of the ladder beside the others, at the same bits."""

from __future__ import annotations

from kvlab.ladder import rungs
from kvlab.params import Params
from kvlab.recipe import Cell


def cells(params: Params, engine: str) -> list[Cell]:
    """Every rung on every layer, over the coded clean cache, text by text; none on another engine than its own.

    The snapshot protocol and float32, so that nothing but the codec's own error is measured.
    """
    if engine != params.ladder.engine:
        return []
    return [
        Cell(
            study="ladder",
            label=label,
            engine=engine,
            dtype="float32",
            protocol="snapshot",
            origin=params.calibration.origin,
            stream="kv",
            layers=tuple(range(params.model.n_layers)),
            windows=params.ladder.windows,
            text=text,
            recipe=recipe,
        )
        for text in params.ladder.texts
        for label, recipe in rungs(params)
    ]
