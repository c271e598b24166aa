"""One codec at every allowed division of its bits between K and V. Torch-free."""

from __future__ import annotations

from kvlab.codecs.klt import KltStream
from kvlab.codecs.recipes import named_recipe
from kvlab.core.codec_settings import MOST_BITS
from kvlab.core.params import Params
from kvlab.core.recipe import Cell, Recipe

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
    recipe = named_recipe(params.split.codec, k, v, params=params)
    if not isinstance(recipe.k, KltStream):
        return recipe
    own = {"budget": "stream"}  # where bits are equal too: what is compared is what K and V get
    return Recipe(k=recipe.k.model_copy(update=own), v=recipe.v.model_copy(update=own))
