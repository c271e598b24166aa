"""The full factorial of the decomposition: every engine, protocol, dtype, variance ratio and origin."""

from __future__ import annotations

from itertools import product

from kvlab.codecs.block.studied import coded_layers, studied_recipe, variance_ratios
from kvlab.core.params import Params
from kvlab.core.recipe import IDENTITY, Cell, Recipe

READS = ("windows", "engines", "protocols", "gap", "baseline")  # of params.yaml, beside what every codec reads


def cells(params: Params, engine: str) -> list[Cell]:
    """The corners on one engine, and in each dtype the two floors: a plain rerun, and the identity codec.

    K and V are coded, on every window that `gap` has for a dtype; a rerun is of fewer.
    """
    everything = tuple(range(params.model.n_layers))

    def cell(
        label: str,
        dtype: str,
        protocol: str,
        layers: tuple[int, ...],
        recipe: Recipe,
        origin: str,
        most: int = params.windows.test,
    ) -> Cell:
        """One corner or floor: K and V coded."""
        return Cell(
            study="factors",
            label=label,
            engine=engine,
            dtype=dtype,
            protocol=protocol,
            origin=origin,
            stream="kv",
            layers=layers,
            windows=min(params.gap.windows_in(dtype, params), most),
            recipe=recipe,
        )

    found = []
    for dtype in params.gap.dtypes:
        reruns = params.baseline.reruns
        found.append(cell("rerun", dtype, "in_forward", (), IDENTITY, params.calibration.origin, reruns))
        for protocol in params.protocols:
            found.append(cell("identity", dtype, protocol, everything, IDENTITY, params.calibration.origin))
        for protocol, origin, ratio in product(params.protocols, origins(params), variance_ratios(params)):
            recipe = studied_recipe(params, ratio)
            found.append(cell("kv", dtype, protocol, coded_layers(params), recipe, origin))
    return found


def origins(params: Params) -> tuple[str, ...]:
    """Those of the factor, and the one that every other study is calibrated with."""
    return tuple(dict.fromkeys((*params.gap.origins, params.calibration.origin)))
