"""One codec at every allowed division of its bits between K and V. Torch-free."""

from __future__ import annotations

from kvlab.base.params import Params
from kvlab.base.recipe import MOST_BITS, Cell, Recipe
from kvlab.base.rungs import ladder_recipe

READS = ("engines", "gap", "protocols", "windows", "split")  # of params.yaml, beside what every codec reads


def divisions(params: Params) -> list[tuple[int, int]]:
    """Bits of K and of V, the most even division first; of equally even ones the one with fewer bits for K."""
    total, apart = params.split.total, params.split.apart
    pairs = [(k, total - k) for k in range(1, MOST_BITS + 1) if 1 <= total - k <= MOST_BITS]
    allowed = [(k, v) for k, v in pairs if abs(2 * k - total) <= 2 * apart]
    return sorted(allowed, key=lambda pair: abs(pair[0] - pair[1]))


def cells(params: Params, engine: str) -> list[Cell]:
    """A cell for each division, on all layers; their floor is that of the factorial."""
    return [
        Cell(
            study="split",
            label=f"K {k}, V {v}",
            engine=engine,
            dtype=params.gap.dtype,
            protocol=params.split.protocol,
            origin=params.calibration.origin,
            stream="kv",
            layers=tuple(range(params.model.n_layers)),
            windows=params.split.windows,
            recipe=divided(params, k, v),
        )
        for k, v in divisions(params)
    ]


def divided(params: Params, k: int, v: int) -> Recipe:
    """The codec with its own settings for each stream, at bits of their own."""
    codec = params.split.codec
    return Recipe(k=ladder_recipe(codec, k, "", params).k, v=ladder_recipe(codec, v, "", params).v)
