"""Case: a layer whose codec is the identity. Alone it costs nothing, and leaving it out changes nothing."""

from __future__ import annotations

import numpy as np
import polars as pl

from kvlab.codecs.hadamard import HadamardStream
from kvlab.core.recipe import IDENTITY, LayerRecipe, Recipe
from kvlab.measure.coding import Coder
from kvlab.stats.bootstrap import Column
from validation.planted.claims import Case, Claim, exactly
from validation.planted.ground import EXACT, Ground, column, measured

CASE = "a layer with the identity codec"
UNIT = "nats per token"
PROTOCOLS = ("in_forward", "snapshot")
STREAM = HadamardStream(bits=2)  # of the other layers; it needs no calibration
OTHERS = Recipe(k=STREAM, v=STREAM)


ABOUT = (
    "The layer in the middle runs the identity codec, the others a real one. Coded alone it must cost nothing, and"
    " leaving it uncoded must change no token, under either protocol."
)


def case(ground: Ground) -> Case:
    """For the layer in the middle, under both protocols."""
    layer = ground.layers[len(ground.layers) // 2]
    rest = tuple(i for i in ground.layers if i != layer)
    exempt = (LayerRecipe(layers=(layer,), recipe=IDENTITY),)
    found: list[Claim] = []
    for protocol in PROTOCOLS:
        windows = min(EXACT, len(ground.test))
        settings = {"protocol": protocol, "windows": windows}
        cells = {
            "alone": ground.cell("only the planted layer", IDENTITY, layers=(layer,), **settings),
            "with": ground.cell("all layers", OTHERS, exceptions=exempt, **settings),
            "without": ground.cell("all but the planted layer", OTHERS, layers=rest, **settings),
        }
        coders = {name: Coder(cell, None) for name, cell in cells.items()}
        rows = measured(ground, coders, windows)
        for coder in coders.values():
            coder.refuse_idle()
        alone = column(rows, "alone")
        found.append(exactly(CASE, f"add-one-in, {protocol}", UNIT, 0.0, alone))
        for quantity in ("kl", "nll_alt"):
            name = f"leave-one-out, {protocol}: difference in {quantity}"
            found.append(exactly(CASE, name, UNIT, 0.0, difference(rows, "with", "without", quantity)))
    return Case(CASE, ABOUT, found)


def difference(rows: pl.DataFrame, a: str, b: str, quantity: str) -> Column:
    """Absolute difference of two cells, token by token, so that none can make up for another."""
    first, second = (rows.filter(pl.col("cell_id") == name).sort("window", "position") for name in (a, b))
    apart = np.abs(first[quantity].to_numpy() - second[quantity].to_numpy())
    return Column.of(first["window"].to_numpy(), first["position"].to_numpy(), apart)
