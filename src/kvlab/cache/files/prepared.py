"""A recipe file made ready for one model: its layers, its calibration, its codecs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvlab.cache.files.calibration import load_calibration
from kvlab.cache.files.recipe import CalibratedRecipeFile, CalibrationFiles, RecipeFile
from kvlab.calibration.load import Calibrated, FittedFiles, load
from kvlab.calibration.needs import by_position, needed_files
from kvlab.codecs.base import Codec
from kvlab.codecs.recipes import named_recipe
from kvlab.codecs.registry import bare, build
from kvlab.core.errors import CalibrationMismatch, ParamsError, StorageError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import WHOLE, Placement, Recipe, StreamRecipe, digest


@dataclass(frozen=True)
class Prepared:
    """A recipe with what it needs of one model.

    Parameters
    ----------
    recipe : Recipe
    layers : tuple of int
        The coded layers.
    n_layers : int
        Those of the model.
    calibration : Calibrated or None
        None where the recipe reads nothing that was fitted, whatever its file names.
    by_position : bool
        See `Calibrated.stream`.
    """

    recipe: Recipe
    layers: tuple[int, ...]
    n_layers: int
    calibration: Calibrated | None
    by_position: bool = False

    @property
    def calibration_hash(self) -> str | None:
        """Of the calibration's files."""
        return self.calibration.calibration_hash if self.calibration else None

    @property
    def identity(self) -> str:
        """The recipe's id; where it codes some layers only, a digest of the recipe and the layers."""
        if len(self.layers) == self.n_layers:
            return self.recipe.recipe_id
        return digest({"recipe": self.recipe.model_dump(mode="json"), "layers": sorted(self.layers)})

    def codec(self, stream: Literal["k", "v"], ends: bool = True) -> Codec:
        """The codec of K or of V, made anew; `CalibrationMismatch` when no codebook fits it.

        Without `ends` it leaves the tokens that a recipe keeps exact to the cache around it.
        """
        recipe, make = getattr(self.recipe, stream), build if ends else bare
        given = recipe, stream, self.recipe.placement, self.by_position
        return make(recipe, self.calibration.stream(*given) if self.calibration else None)


def prepared(file: RecipeFile, info: ModelInfo, whole: bool = False, by_position: bool = False) -> Prepared:
    """Check a recipe file against a model and read its calibration.

    Parameters
    ----------
    whole : bool
        Whether a codec will do that codes all layers of a cache at once.
    by_position : bool
        Whether K after its rotary embedding is coded less its mean by position; see `Calibrated.stream`.

    Raises
    ------
    ParamsError
        It codes a layer that the model does not have.
    StorageError
        A file of the calibration is missing or damaged.
    CalibrationMismatch
        The calibration belongs to another model, or lacks what the recipe needs.
    CapabilityError
        The codec codes whole caches, and tensors are to be coded one by one.
    """
    layers = tuple(range(info.n_layers)) if file.layers is None else file.layers
    beyond = [layer for layer in layers if not 0 <= layer < info.n_layers]
    if beyond:
        raise ParamsError(
            f"the recipe file codes layer {beyond[0]}; the model has 0 to {info.n_layers - 1}",
            code="params.no-such-layer",
        )
    ready = Prepared(file.recipe, layers, info.n_layers, _calibrated(file, info), by_position)
    if not (whole and file.recipe.k.codec in WHOLE):
        for stream in ("k", "v"):
            ready.codec(stream)
    elif ready.calibration is None or ready.calibration.archive is None:
        raise CalibrationMismatch(
            f"no fitted {file.recipe.k.codec} is given; write one with `kvlab calibrate`", code="calibration.missing"
        )
    return ready


class FromFile:
    """The calibration of a recipe file for one model, as the codecs ask for it; read when they first do.

    Parameters
    ----------
    file : RecipeFile
        One that names a calibration, or holds it.
    info : ModelInfo
        The model.

    Attributes
    ----------
    identity : tuple of str
        Of what is in the file and of the model: two of one identity say the same.

    Raises
    ------
    StorageError, CalibrationMismatch
        As `prepared`; of a file that holds its own calibration, when it is first read.
    """

    def __init__(self, file: RecipeFile, info: ModelInfo):
        self.file, self.info = file, info
        self._ready: Prepared | None = None
        own = file.identity if isinstance(file, CalibratedRecipeFile) else self._read().calibration_hash
        self.identity = (own, info.model_hash)

    def stream(
        self, recipe: StreamRecipe, which: Literal["k", "v"], placement: Placement = "pre_rope", turned: bool = False
    ):
        """See `Calibrated.stream`."""
        found = self._read().calibration
        return found.stream(recipe, which, placement, turned) if found else None

    def _read(self) -> Prepared:
        if self._ready is None:
            self._ready = prepared(self.file, self.info, by_position=by_position(self.file.recipe))
        return self._ready


def at_bits(ready: Prepared, bits: float | None) -> Prepared:
    """The same at other bits, of a codec of whole caches, whose calibration serves all; as it is where they are None.

    Raises
    ------
    ParamsError
        The codec's bits are its recipe's.
    """
    own = ready.recipe.k
    if bits is None:
        return ready
    if own.codec not in WHOLE:
        raise ParamsError(
            f"bits are {bits:g}, and those of codec {own.codec!r} are its recipe's; leave them out", code="params.bits"
        )
    return replace(ready, recipe=named_recipe(own.codec, bits, block_size=own.block_size))


def _calibrated(file: RecipeFile, info: ModelInfo) -> Calibrated | None:
    if isinstance(file, CalibratedRecipeFile):
        return load_calibration(file.file, info, file.identity)
    needed = needed_files(file.recipe)
    if not needed:
        return None
    files = dict(file.calibration) if file.calibration else {}
    missing = [name for name in needed if files.get(name) is None]
    if missing:
        raise CalibrationMismatch(
            f"recipe {file.recipe.recipe_id} ({_codecs(file.recipe)}) needs {' and '.join(missing)} of a calibration;"
            f" name them: kvlab recipe {' '.join(f'--{name} FILE' for name in missing)}, or make one file of everything"
            " with kvlab calibrate",
            code="calibration.missing",
        )
    refuse_missing(file.calibration)
    return load(FittedFiles(**files), info.model_hash)


def refuse_missing(files: CalibrationFiles) -> None:
    """`StorageError` names the first file of a calibration that is not there."""
    for name, path in files:
        if path is not None and not Path(path).is_file():
            raise StorageError(f"cannot read {path}: no such file; run `kvlab step {name}`", code="storage.cannot-read")


def _codecs(recipe: Recipe) -> str:
    return f"K {recipe.k.codec}, V {recipe.v.codec}"
