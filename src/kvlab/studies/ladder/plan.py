"""Every codec of the ladder beside the others, at the same bits."""

from __future__ import annotations

from kvlab.base.params import Params
from kvlab.base.recipe import Cell, Recipe
from kvlab.base.rungs import Conditioning, has_bits, ladder_recipe


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


def rungs(params: Params) -> list[tuple[str, Recipe]]:
    """(label, recipe) of every rung that ``params.ladder`` asks for, a codec's own ones together."""
    found = []
    for codec in params.ladder.codecs:
        choices: list[Conditioning] = [""]
        if codec in params.ladder.conditioned:
            choices += ["center", "center+whiten"]
        for bits in params.ladder.bits if has_bits(codec) else (None,):
            for conditioning in choices:
                name = "+".join(filter(None, [codec, conditioning]))
                label = name if bits is None else f"{name} {bits}"
                found.append((label, ladder_recipe(codec, bits, conditioning, params)))
    return found
