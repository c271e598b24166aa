"""What verbs were given, read: parameters, fitted files, tiers. Heavy imports happen inside the functions."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlab.base.errors import UserError
from kvlab.base.params import Params
from kvlab.studies.settings import read_params


def params_of(args: argparse.Namespace) -> Params:
    """What `--params` and `--model` name."""
    return read_params(args.params, args.model)


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
    """
    from pydantic import BaseModel, ValidationError

    from kvlab.base.errors import ParamsError
    from kvlab.base.recipe import Recipe
    from kvlab.base.records import read_json

    class Head(BaseModel):
        recipe: Recipe

    if file.is_file() and (file.suffix == ".kv" or b"\0" in file.open("rb").read(8)):
        return  # what `kvlab calibrate` wrote: safetensors
    said = read_json(file)
    if not isinstance(said, dict) or "recipe" not in said:
        raise ParamsError(
            f"{file} is no recipe file, it has no `recipe`; `kvlab recipe` or `kvlab calibrate` writes one"
        )
    try:
        Head.model_validate(said)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ParamsError(f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def tier(text: str) -> str:
    """A tier; the catalogue that lists them is read when one is given."""
    from kvlab.base.errors import UnknownName
    from kvlab.gate.catalogue.columns import TIERS

    if text not in TIERS:
        raise argparse.ArgumentTypeError(str(UnknownName("tier", text, TIERS)))
    return text
