"""Errors of known kind in a codec's place: Gaussian noise of any size, a dtype's rounding, a codec's norm alone."""

from __future__ import annotations

from kvlab.codecs.block.studied import coded_layers, studied_recipe
from kvlab.codecs.cast import CastStream
from kvlab.codecs.isotropic import IsotropicStream
from kvlab.codecs.noise import NoiseStream
from kvlab.core.params import Params
from kvlab.core.recipe import IDENTITY, Cell, Recipe

READS = ("engines", "noise")  # of params.yaml, beside what every codec reads


def cells(params: Params, engine: str) -> list[Cell]:
    """Noise by stream, layer group and size; per stream the rounding to bfloat16, and codec against control.

    An engine in bfloat16 has nothing to round, so it brings no such cell. The control is
    the studied codec's error turned in a random direction of the same length, token by token.
    """
    if engine not in params.noise.engines:
        return []
    groups = layer_groups(params)

    def cell(label: str, stream: str, layers: tuple[int, ...], recipe: Recipe) -> Cell:
        """One kind of error on some layers of one stream."""
        return Cell(
            study="noise",
            label=label,
            engine=engine,
            dtype=params.noise.dtype,
            protocol=params.noise.protocol,
            origin=params.calibration.origin,
            stream=stream,
            layers=layers,
            windows=params.noise.windows,
            recipe=recipe,
        )

    found = [cell("identity", "kv", groups["all"], IDENTITY)]
    for stream in params.noise.streams:
        for group in params.noise.groups:
            for sigma in params.noise.sigmas if groups[group] else ():
                noise = NoiseStream(sigma=sigma, seed=params.noise.seed)
                found.append(cell(f"noise {group} {sigma:g}", stream, groups[group], Recipe(k=noise, v=noise)))
    streams = tuple(dict.fromkeys((*params.noise.streams, "kv")))
    studied = studied_recipe(params)
    for stream in streams:
        if params.noise.dtype == "float32":
            found.append(cell("cast", stream, groups["all"], Recipe(k=CastStream(), v=CastStream())))
        found.append(cell("codec", stream, groups["coded"], studied))
        found.append(cell("isotropic", stream, groups["coded"], isotropic(studied, params.noise.seed)))
    return found


def isotropic(recipe: Recipe, seed: int) -> Recipe:
    """`recipe` with its error turned in a random direction."""
    return Recipe(k=IsotropicStream(of=recipe.k, seed=seed), v=IsotropicStream(of=recipe.v, seed=seed))


def layer_groups(params: Params) -> dict[str, tuple[int, ...]]:
    """Layers by the name of their group; a group may be empty."""
    everything, coded = tuple(range(params.model.n_layers)), coded_layers(params)
    return {"all": everything, "coded": coded, "boundary": tuple(i for i in everything if i not in coded)}
