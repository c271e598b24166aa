"""Per-layer attribution: the studied recipe on one layer alone, on all but one, and on all."""

from __future__ import annotations

from kvlab.codecs.block.studied import studied_recipe
from kvlab.core.params import Params
from kvlab.core.recipe import IDENTITY, Cell, Recipe

READS = ("engines", "layers")  # of params.yaml, beside what every codec reads


def cells(params: Params, engine: str) -> list[Cell]:
    """Add-one-in and leave-one-out, stream by stream, and all layers together: of each stream, and of K and V."""
    if engine not in params.layers.engines:
        return []
    everything = tuple(range(params.model.n_layers))
    recipe = studied_recipe(params)

    def cell(label: str, protocol: str, stream: str, layers: tuple[int, ...], recipe: Recipe = recipe) -> Cell:
        """One recipe, the studied one as a rule, on some layers of one stream."""
        return Cell(
            study="layers",
            label=label,
            engine=engine,
            dtype=params.layers.dtype,
            protocol=protocol,
            origin=params.calibration.origin,
            stream=stream,
            layers=layers,
            windows=params.layers.windows,
            recipe=recipe,
        )

    found = []
    for protocol in params.layers.protocols:
        found.append(cell("identity", protocol, "kv", everything, IDENTITY))
        for stream in params.layers.streams:
            found += [cell(f"only layer {i}", protocol, stream, (i,)) for i in everything]
            rest = {i: tuple(j for j in everything if j != i) for i in everything}
            left_out = [i for i in everything if rest[i]] if params.layers.left_out else []
            found += [cell(f"all but layer {i}", protocol, stream, rest[i]) for i in left_out]
            found.append(cell("all layers", protocol, stream, everything))
        found.append(cell("all layers", protocol, "kv", everything))
    return found
