"""What verbs were given, read: parameters, fitted files, tiers. Heavy imports happen inside the functions."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlab.core.errors import ParamsError, UserError
from kvlab.core.filekind import is_calibration_file, recipe_json
from kvlab.core.hub import no_folder
from kvlab.core.params import Model, Params

DEFAULT_PARAMS = "params.yaml"


def params_of(args: argparse.Namespace) -> Params:
    """What `--params` and `--model` name."""
    from kvlab.cli.packages import reader_of_params

    return reader_of_params().read_params(args.params, args.model)


def model_of(args: argparse.Namespace) -> Model:
    """The model that `--model` names: a folder, which needs no params.yaml, or one of params.yaml.

    Raises
    ------
    UserError
        There is neither.
    ModelError
        The folder is none of a model.
    """
    return folder_of(args) or params_of(args).model


def folder_of(args: argparse.Namespace) -> Model | None:
    """The model of a folder that `--model` names; None where it names one of params.yaml. Raises as `model_of`."""
    from kvlab.core.model import model_in

    name, path = args.model, Path(args.model or ".")
    if name and ((path / "config.json").is_file() or "/" in name or name in (".", "..")):
        return model_in(path)
    if args.params == DEFAULT_PARAMS and not Path(args.params).exists():
        if name and path.is_dir():
            return model_in(path)  # which says what it lacks
        if name:
            raise UserError(f"--model {name}: {no_folder(name)}; there is no {DEFAULT_PARAMS} here that could list it")
        raise UserError(f"name the model: --model DIR, its folder (there is no {DEFAULT_PARAMS} here that names one)")
    return None


def bits_of(args: argparse.Namespace, params: Params) -> Params:
    """The parameters with the bits of `--bits` and `--v-bits`, where these are given."""
    if args.bits is None and args.v_bits is None:
        return params
    bits = params.bits if args.bits is None else args.bits
    v_bits = bits if args.v_bits is None else args.v_bits
    if not all(1 <= one <= 8 for one in (bits, v_bits)):
        raise ParamsError(f"--bits {bits} and --v-bits {v_bits}; allowed: 1 to 8")
    return params.model_copy(update={"bits": bits, "v_bits": v_bits})


def fitted_of(args: argparse.Namespace):
    """The calibration that --sigma, --codebooks and --components name; None without one."""
    from kvlab.calibration.load import Fitted

    codebooks, components = args.codebooks, getattr(args, "components", None)
    if args.sigma is None and (codebooks or components):
        raise UserError("--codebooks and --components belong to a Sigma_q; name it with --sigma")
    return Fitted(args.sigma, codebooks, components) if args.sigma else None


def refuse_wrong_recipe(file: Path) -> None:
    """Look at the recipe of a JSON recipe file, so that a mistake in it is told before torch is imported.

    Raises
    ------
    StorageError
        The file cannot be read or is no JSON.
    ParamsError
        Its recipe is none.
    CalibrationMismatch
        It holds a cache, and no recipe.
    """
    from pydantic import BaseModel, ValidationError

    from kvlab.core.recipe import Recipe

    class Head(BaseModel):
        recipe: Recipe

    if file.is_file() and is_calibration_file(file):
        return
    try:
        Head.model_validate(recipe_json(file))
    except ValidationError as error:
        problem = error.errors()[0]
        raise ParamsError(f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def tier(text: str) -> str:
    """A tier; the catalogue that lists them is read when one is given."""
    from kvlab.core.errors import UnknownName
    from kvlab.gate.catalogue.columns import TIERS

    if text not in TIERS:
        raise argparse.ArgumentTypeError(str(UnknownName("tier", text, TIERS)))
    return text
