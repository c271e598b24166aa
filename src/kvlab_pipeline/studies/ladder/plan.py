"""Every codec of the ladder beside the others, at the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.codecs.catalogue import Conditioning, has_bits, rates
from kvlab.codecs.recipes import named_recipe
from kvlab.core.params import Params
from kvlab.core.recipe import Cell, Recipe

LESS = {
    "escapes": {"escape": False},
    "budget": {"budget": "tensor"},
    "tables": {"tables": "gaussian"},
    "allocation": {"tables": "gaussian", "allocation": "even"},
    "transform": {"tables": "gaussian", "transform": "none"},
    "joint": {"tables": "gaussian", "transform": "per_head"},
    "metric": {"tables": "gaussian", "transform": "unweighted"},
}
"""Settings of `KltStream` with a part taken out."""
READS = ("ladder",)  # of params.yaml, beside what a codec reads; no bits of the studied recipe


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
            origin=params.calibration.origin,
            stream="kv",
            layers=tuple(range(params.model.n_layers)),
            text=text,
            recipe=recipe,
            **where,
        )
        for text in params.ladder.texts
        for label, recipe, where in planned(params)
    ]


def planned(params: Params) -> Iterator[tuple[str, Recipe, dict]]:
    """Label, recipe, and protocol with its span and windows, of everything that is measured on a text."""
    over_cache, inside = {"protocol": "snapshot"}, {"protocol": "in_forward", "windows": params.ladder.fewer}
    found = rungs(params)
    yield from ((label, recipe, over_cache | {"windows": params.ladder.windows}) for label, recipe in found)
    yield from ((one.label, one.recipe, over_cache | {"windows": params.ladder.fewer}) for one in ablations(params))
    for label, recipe in (cheapest(params, codec) for codec in params.ladder.in_forward):
        yield from ((label, recipe, inside | {"span": span}) for span in ("context", "window"))


def cheapest(params: Params, codec: str) -> tuple[str, Recipe]:
    """(label, recipe) of a codec at the fewest bits of the ladder."""
    bits = min(params.ladder.bits) if has_bits(codec) else None
    return named(codec, bits), named_recipe(codec, bits, params=params)


def named(rung: str, bits: float | None) -> str:
    """A rung's label."""
    return rung if bits is None else f"{rung} {bits:g}"


@dataclass(frozen=True)
class Ablation:
    """`klt` with a part taken out: its label, its recipe, and the label of what it is held against."""

    label: str
    recipe: Recipe
    against: str


def ablations(params: Params) -> list[Ablation]:
    """`klt` at the fewest bits, less a part.

    Where axes or bits are others there are no fitted tables, so these are held against the one that lacks tables alone.
    """
    if not params.ladder.ablated:
        return []
    whole, recipe = cheapest(params, "klt")
    bare = f"{whole} less tables"
    found = []
    for part in ("tables", *(part for part in params.ladder.ablated if part != "tables")):
        own = {stream: getattr(recipe, stream).model_copy(update=LESS[part]) for stream in ("k", "v")}
        alone = "tables" not in LESS[part] or part == "tables"
        label = f"{whole} less {part}" if alone else f"{bare}, {part}"
        found.append(Ablation(label, Recipe(**own), whole if alone else bare))
    return found


def rungs(params: Params) -> list[tuple[str, Recipe]]:
    """(label, recipe) of every rung that ``params.ladder`` asks for, a codec's own ones together."""
    found = []
    for codec in params.ladder.codecs:
        choices: list[Conditioning] = [""]
        if codec in params.ladder.conditioned:
            choices += ["center", "center+whiten", "center+weigh"]
        for bits in rates(codec, params.ladder.bits, params.ladder.whole_bits):
            for conditioning in choices:
                whole = "+".join(filter(None, [codec, conditioning]))
                found.append((named(whole, bits), named_recipe(whole, bits, params=params)))
    return found
