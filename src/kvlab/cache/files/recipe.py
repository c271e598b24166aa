"""The file that `encode`, `decode` and the drop-ins take: a recipe, the layers, the calibration's files.

It is JSON that names the files, as `kvlab recipe` writes it, or one file that holds everything, as `kvlab calibrate`
writes it (`calibration`). Which of both a file is is seen from its content.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from kvlab.cache.files.calibration import read_header
from kvlab.codecs.catalogue import TENSORWISE, UNSTORED
from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import CapabilityError, ParamsError
from kvlab.core.filekind import is_calibration_file, recipe_json
from kvlab.core.recipe import Recipe
from kvlab.core.records import write_json


class CalibrationFiles(Frozen):
    """Where a calibration lies; relative paths start at the recipe file's own folder."""

    sigma: Path
    codebooks: Path | None = None
    components: Path | None = None


class RecipeFile(Frozen):
    """What to run and where: `layers` None means every layer, `calibration` None that nothing was fitted."""

    recipe: Recipe
    layers: tuple[int, ...] | None = None
    calibration: CalibrationFiles | None = None


class CalibratedRecipeFile(RecipeFile):
    """The same of a file that holds its own calibration: where that is, and the header's `identity`."""

    file: Path
    identity: str


def read_recipe_file(path: Path | str) -> RecipeFile:
    """Read a recipe file; the calibration's paths come back absolute.

    Of a file that holds its own calibration, a `CalibratedRecipeFile`, whose tensors are not read yet.

    Raises
    ------
    StorageError
        The file is missing, damaged or no JSON.
    ParamsError
        It is no recipe; one line that names the field.
    CalibrationMismatch
        It is safetensors, but no calibration file of this version.
    CapabilityError
        A codec of it is a control of measurements, which leaves nothing to store or to serve.
    """
    if is_calibration_file(path):
        header = read_header(path)
        _refuse_controls(header.recipe, path)
        file = Path(path).absolute()
        return CalibratedRecipeFile(recipe=header.recipe, layers=header.layers, file=file, identity=header.identity)
    try:
        found = RecipeFile.model_validate(recipe_json(path))
    except ValidationError as error:
        raise ParamsError(f"{path}: {_first_problem(error)}", code="params.recipe") from None
    if found.layers is not None and (not found.layers or len(set(found.layers)) < len(found.layers)):
        raise ParamsError(
            f"{path}: layers is {list(found.layers)}; give each layer once, or null for all of them",
            code="params.layers",
        )
    _refuse_controls(found.recipe, path)
    if found.calibration is None:
        return found
    folder = Path(path).absolute().parent
    files = {name: file and folder / file for name, file in found.calibration}
    return found.model_copy(update={"calibration": CalibrationFiles(**files)})


def write_recipe_file(
    path: Path | str,
    recipe: Recipe,
    layers: Iterable[int] | None = None,
    calibration: CalibrationFiles | None = None,
) -> Path:
    """Write a recipe file and give its absolute path, as ``KVLAB_RECIPE`` takes it.

    Parameters
    ----------
    recipe : Recipe
        What is done to K and to V.
    layers : iterable of int, optional
        The coded layers; every layer when left out.
    calibration : CalibrationFiles, optional
        Files as seen from here; they are stored relative to the new file, so that the folder can move.
    """
    path = Path(path).absolute()
    if calibration is not None:
        files = {name: file and Path(os.path.relpath(file, path.parent)) for name, file in calibration}
        calibration = CalibrationFiles(**files)
    content = RecipeFile(recipe=recipe, layers=None if layers is None else tuple(layers), calibration=calibration)
    write_json(path, content.model_dump(mode="json"))
    return path


def _refuse_controls(recipe: Recipe, path: Path | str) -> None:
    for stream, chosen in (("k", recipe.k), ("v", recipe.v)):
        if chosen.codec in UNSTORED:
            able = ", ".join(name for name in TENSORWISE if name not in UNSTORED)
            raise CapabilityError(
                f"{path}: codec {chosen.codec!r} of stream {stream} writes no codes to store; allowed: {able}",
                code="capability.no-codes",
            )


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where, given = ".".join(map(str, problem["loc"])) or "the file", problem["input"]
    shown = "" if isinstance(given, dict) else f" is {given!r}"
    return f"{where}{shown}: {problem['msg']}"
