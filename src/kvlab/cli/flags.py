"""Kinds of flags, as typer is told of them in the signature of a verb; and the flags of several verbs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.parsing import unknown
from kvlab.core import recipe as recipes
from kvlab.core.errors import ParamsError, StorageError, UserError
from kvlab.core.filekind import CODEC_ENDING, is_calibration_file, recipe_json
from kvlab.core.hub import no_folder
from kvlab.core.output_paths import absence, refuse_no_file


def word(text: str, *names: str, read: Callable | None = None, argument: bool = False, **options):
    """A flag of the parameter's name, or of `names`, that takes one word, which `read` turns into a value.

    One that takes several has a metavar that ends in ``...``; in brackets, it may be left without a word.

    Parameters
    ----------
    argument : bool
        It is given without a flag.
    """
    kind = typer.Argument if argument else typer.Option
    return kind(*names, help=text, show_default=False, parser=read and reading(read), **{"metavar": "WORD"} | options)


NUMBERS = {int: "whole number", float: "number"}


def reading(read: Callable) -> Callable:
    """A parser of typer, which also gets defaults: what is no text any more is left as it is."""

    def parser(given: object) -> object:
        if not isinstance(given, str):
            return given
        try:
            return read(given)
        except UserError as error:
            raise typer.BadParameter(str(error)) from None
        except ValueError:
            raise typer.BadParameter(f"{given!r} is no {NUMBERS.get(read, 'valid value')}") from None

    return parser


def path(text: str, *names: str, **options):
    """A flag that names a file or folder which is read.

    One that is not there is refused while the command line is read, before anything is imported for it.
    """
    return word(text, *names, **{"read": existing(text), "metavar": "FILE"} | options)


def several(kinds: Mapping[str, str], metavar: str = "FILE ...") -> list[Parameter]:
    """For `FromFlags`: a flag that names files of each kind, by its help."""
    return [
        Parameter(
            kind, Parameter.KEYWORD_ONLY, default=(), annotation=Annotated[list[Path], path(text, metavar=metavar)]
        )
        for kind, text in kinds.items()
    ]


def result(text: str, *names: str, **options):
    """A flag that names what is written: a file, unless the help says that it is a folder.

    What is no file is refused before minutes of measuring.
    """
    return word(
        text, *names, **{"read": filled if text.startswith("folder ") else written, "metavar": "FILE"} | options
    )


def place(text: str, **options):
    """A file that is given without a flag."""
    return word(text, argument=True, **{"read": Path, "metavar": "FILE"} | options)


def model_folder(text: str = "of a Hugging Face model", **options):
    """A flag or an argument that names a model's folder; a hub id is told what to do."""
    return word(f"folder {text}", read=_model_folder, metavar="DIR", **options)


def number(text: str, read: Callable = int, *names: str, metavar: str = "N"):
    """A flag that takes a number."""
    return word(text, *names, read=read, metavar=metavar)


def choice(text: str, choices: Iterable[str], **options):
    """A flag that takes one of some words."""

    def one_of(given: str) -> str:
        if given not in choices:
            raise UserError(unknown(given, choices))
        return given

    def begun(incomplete: str) -> list[str]:
        return [one for one in choices if one.startswith(incomplete)]

    return word(text, read=one_of, autocompletion=begun, **{"metavar": f"{{{','.join(choices)}}}"} | options)


def switch(text: str, *names: str):
    """A flag that takes no word."""
    return typer.Option(*names, help=text, show_default=False)


def written(given: str) -> Path:
    """A path at which a file may be written."""
    refuse_no_file(given)
    return Path(given)


def cached(ending: str) -> Callable[[str], Path]:
    """Reads a path at which a file of a cache may be written; such end in `ending`, never in ``.kv``."""

    def read(given: str) -> Path:
        path = written(given)
        if path.suffix == CODEC_ENDING:
            raise UserError(
                f"{given}: names in {CODEC_ENDING} are of codecs, and this is a cache; name it"
                f" {path.with_suffix(ending)}"
            )
        return path

    return read


def filled(given: str) -> Path:
    """A folder into which files may be written, there or not yet."""
    if not given or (Path(given).exists() and not Path(given).is_dir()):
        raise UserError(f"cannot write into {given!r}: it is no folder; name one, or a new name")
    return Path(given)


def existing(text: str) -> Callable[[str], Path]:
    """Reads a path that there is; `text` is the flag's help, which may name the verb that writes it."""

    def read(given: str) -> Path:
        if (why := absence(given)) is not None:
            writer = re.search(r"`(kvlab [^`]+)` wrote", text) or re.search(r" of `(kvlab [^`]+)`", text)
            hint = f"; run `{writer[1]}`" if writer and why == "no such file" else ""
            raise StorageError(f"cannot read {given}: {why}{hint}")
        return Path(given)

    return read


def recipe(text: str, **options):
    """A flag that names a recipe file; one whose recipe is none is refused without torch, all else by its reader."""

    def read(given: str) -> Path:
        file = existing(text)(given)
        refuse_wrong_recipe(file)
        return file

    return path(text, read=read, **options)


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


def whole(least: int) -> Callable[[str], int]:
    """Reads a whole number, at least so many."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            raise UserError(f"{text!r}; allowed: a whole number of at least {least}")
        return int(text)

    return read


def window_count(text: str, default: int):
    """A flag for how many windows of a text, read with `most_windows`; without it `default`, or all that there are."""
    return number(f"{text}; default: {default}, or as many as the text has", whole(2))


class Most(int):
    """How many windows are taken where nobody said how many."""


def most_windows(given: int, flag: str) -> tuple[int, str | None]:
    """How many windows at most, and the flag where just so many were wanted: `most` and `exactly` of `windows_of`."""
    return given, None if isinstance(given, Most) else flag


def _model_folder(given: str) -> Path:
    """A folder that there is."""
    if not Path(given).is_dir():
        raise UserError(no_folder(given))
    return Path(given)


WROTE = "what `kvlab recipe` wrote, or `kvlab calibrate`"
DTYPES = ("float32", "bfloat16")
ENGINES = tuple(recipes.ENGINES)
Engine = Annotated[str, choice("default: hf", ENGINES)]
Dtype = Annotated[
    str | None,
    choice("what the engine computes in; default: as the weights where the processor can, else float32", DTYPES),
]
Out = Annotated[Path, result("what is written (with companions of the same stem beside it)")]
WindowsFile = Annotated[Path, path("windows.safetensors of `kvlab step corpus`")]
NeedlesFile = Annotated[Path, path("needles.parquet of `kvlab step needles`")]
SigmaFile = Annotated[Path, path("what `kvlab step sigma` wrote")]
CodebooksFile = Annotated[Path, path("what `kvlab step codebooks` wrote")]
ComponentsFile = Annotated[Path, path("what `kvlab step components` wrote")]
CaptureFile = Annotated[Path, path("what `kvlab step capture` wrote")]
MetricsFile = Annotated[Path, path("what `kvlab step metrics` wrote")]
SIGNING = path("sign with this shared secret: a file of 32 bytes or more")
CHECKING = path("refuse what is not signed with this shared secret")
JSON = switch("for programs", "--json")
EVERYTHING = result("everything that was found, for programs")
FITTED = {  # a run without a codec does without them
    "sigma": "what `kvlab step sigma` wrote; needed by cells with a codec",
    "codebooks": "what `kvlab step codebooks` wrote; needed by fitted tables",
    "components": "what `kvlab step components` wrote; needed by klt, oscar and mean removal",
    "rotated": "what `kvlab step sigma` wrote after the rotary embedding; needed by post_rope cells",
    "archive": "what `kvlab step archive` wrote; needed by archive",
}
SigmaIfCoded = Annotated[Path | None, path(FITTED["sigma"])]
CodebooksIfCoded = Annotated[Path | None, path(FITTED["codebooks"])]
ComponentsIfCoded = Annotated[Path | None, path(FITTED["components"])]
