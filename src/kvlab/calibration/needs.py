"""Which fitted material a recipe reads, and a cell with it. Torch-free: the plan and the report ask too."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple, get_args

from kvlab.codecs.isotropic import IsotropicStream
from kvlab.codecs.klt import KltStream
from kvlab.core.codec_settings import Kind, Tensor
from kvlab.core.errors import CapabilityError
from kvlab.core.recipe import CODECS, Cell, Placement, PluginStream, Recipe, StreamRecipe, digest

FILES: dict[Kind, str] = {
    "whitener": "sigma",
    "table": "codebooks",
    "components": "components",
    "spectra": "components",
}
"""The files of a pipeline's calibration that a recipe's file names. What a codec fits by itself (``own``) is in none,
and that of a codec of whole caches (``archive``) is for studies alone; `kvlab calibrate` makes one file of everything.
"""


class CalibrationPiece(NamedTuple):
    """One fitted thing that a codec reads.

    `placement` is that of K, ``pre_rope`` for V, which has no rotary embedding; `place` is the layer, or for a
    table, which serves all layers, the digest of its recipe; for spectra, of which all are read, ``all``; for what a
    codec fitted by itself, codec and layer; for a codec of whole caches its name.
    """

    kind: Kind
    stream: Tensor
    placement: Placement
    place: int | str

    @property
    def name(self) -> str:
        """The piece in one word, as a record of a cell names it; for example ``whitener/k/pre_rope/3``."""
        return "/".join(map(str, self))


def coded_by(recipe: StreamRecipe) -> StreamRecipe:
    """The recipe of the codec that runs: an isotropic control runs the codec that it takes the place of."""
    return recipe.of if isinstance(recipe, IsotropicStream) else recipe


def reads(recipe: StreamRecipe, which: Tensor) -> tuple[Kind, ...]:
    """The kinds of fitted material that a codec of this recipe reads for K or for V."""
    recipe = coded_by(recipe)
    whitens, centres, weighs = (getattr(recipe, name, False) for name in ("whiten", "center", "weigh"))
    by_bias = centres == "bias"
    front = {"whitener": whitens and which == "k", "components": (centres and not by_bias) or weighs, "bias": by_bias}
    own = recipe.reads if isinstance(recipe, PluginStream) else CODECS[recipe.codec].reads
    own = own(recipe, which) if callable(own) else own
    found = {*own, *(kind for kind, is_read in front.items() if is_read)}
    found -= {"whitener"} if which == "v" else set()  # Sigma_q weighs errors of K
    return tuple(kind for kind in get_args(Kind) if kind in found)


def by_position(recipe: Recipe) -> bool:
    """Whether to code K one has to know the position of a token: `klt` of K after its rotary embedding."""
    return recipe.rotary == "after" and isinstance(recipe.k, KltStream)


def needs_calibration(recipe: StreamRecipe) -> bool:
    """Whether a codec of this recipe reads anything that was fitted, for K or for V."""
    return bool(reads(recipe, "k") or reads(recipe, "v"))


def reads_weights_alone(recipe: Recipe) -> bool:
    """Whether a recipe reads something, and the model's weights hold all of it: no text is needed."""
    return {*reads(recipe.k, "k"), *reads(recipe.v, "v")} == {"bias"}


def needed_files(recipe: Recipe) -> list[str]:
    """Files of `FittedFiles` that a recipe cannot do without, by field; the other files belong to a `sigma`.

    Raises
    ------
    CapabilityError
        The recipe reads what its codec fits by itself, or biases, which are in none of them.
    """
    kinds = {*reads(recipe.k, "k"), *reads(recipe.v, "v")}
    if {"own", "outputs", "whole", "archive", "bias"} & kinds:
        raise CapabilityError(
            f"recipe {recipe.recipe_id} (K {recipe.k.codec}, V {recipe.v.codec}) reads what is in none of these files;"
            " make one file of everything with kvlab calibrate",
            code="capability.one-file",
        )
    needed = {FILES[kind] for kind in kinds}
    needed |= {"sigma"} if needed else set()
    return [name for name in dict.fromkeys(FILES.values()) if name in needed]


def pieces(cell: Cell) -> dict[str, CalibrationPiece]:
    """Everything fitted that the codecs of a cell read, by name."""
    found = []
    for which, layer in product(cell.stream, cell.layers):
        recipe = coded_by(cell.stream_recipe(which, layer))
        placement = cell.placement if which == "k" else "pre_rope"
        for kind in reads(recipe, which):
            places = {"table": digest(recipe), "own": f"{recipe.codec}/{layer}", "whole": recipe.codec}
            places |= {"spectra": "all", "archive": "all"}
            found.append(CalibrationPiece(kind, which, placement, places.get(kind, layer)))
    return {piece.name: piece for piece in found}
