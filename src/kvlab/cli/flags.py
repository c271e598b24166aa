"""How a flag of the command line is declared: its name, and what argparse is told of it; and those of several verbs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from kvlab.cli.given import DEFAULT_PARAMS, model_of, params_of, refuse_wrong_recipe
from kvlab.core.errors import StorageError, UserError
from kvlab.core.filekind import CODEC_ENDING
from kvlab.core.hub import no_folder
from kvlab.core.output_paths import absence, refuse_no_file

Flag = tuple[str, dict] | Callable[[argparse.ArgumentParser], None]
"""One flag, or what adds several that are declared elsewhere; it is called when its verb is asked for."""
Verbs = Mapping[Callable, list[Flag]]
"""Functions named VERB_verb, each with its flags; the docstring is the help."""


def path(flag: str, text: str, **options) -> Flag:
    """A flag that names a file or folder which is read; needed unless `options` say otherwise.

    One that is not there is refused while the command line is read, before anything is imported for it.
    """
    return flag, {"type": existing(text), "metavar": "FILE", "help": text, "required": True} | options


def result(flag: str, text: str, **options) -> Flag:
    """A flag that names what is written; needed unless `options` say otherwise.

    A file, unless the help says that it is a folder; what is no file is refused before minutes of measuring.
    """
    kind = filled if text.startswith("folder ") else written
    return flag, {"type": kind, "metavar": "FILE", "help": text, "required": True} | options


def written(given: str) -> Path:
    """A type of argparse: a path at which a file may be written."""
    try:
        refuse_no_file(given)
    except StorageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(given)


def cached(ending: str) -> Callable[[str], Path]:
    """A type of argparse: a path at which a file of a cache may be written; such end in `ending`, never in ``.kv``."""

    def read(given: str) -> Path:
        """The path, or argparse's error."""
        path = written(given)
        if path.suffix == CODEC_ENDING:
            raise argparse.ArgumentTypeError(
                f"{given}: names in {CODEC_ENDING} are of codecs, and this is a cache; name it"
                f" {path.with_suffix(ending)}"
            )
        return path

    return read


def filled(given: str) -> Path:
    """A type of argparse: a folder into which files may be written, there or not yet."""
    if not given or (Path(given).exists() and not Path(given).is_dir()):
        raise argparse.ArgumentTypeError(f"cannot write into {given!r}: it is no folder; name one, or a new name")
    return Path(given)


def recipe(text: str) -> Callable[[str], Path]:
    """A type of argparse: a recipe file; one whose recipe is none is refused without torch, all else by its reader."""

    def read(given: str) -> Path:
        """The file, or argparse's error."""
        file = existing(text)(given)
        try:
            refuse_wrong_recipe(file)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return file

    return read


def whole(least: int) -> Callable[[str], int]:
    """A type of argparse: a whole number, at least so many."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number of at least {least}")
        return int(text)

    return number


def window_count(flag: str, text: str, default: int) -> Flag:
    """A flag for how many windows of a text; without it `default`, or as many as there are; read with `wanted`."""
    how = f"{text}; default: {default}, or as many as the text has"
    return word(flag, how, type=whole(2), metavar="N", default=Windows(default))


class Windows(int):
    """How many windows are taken where nobody said how many."""


def wanted(args: argparse.Namespace, flag: str) -> tuple[int, str | None]:
    """How many windows at most, and the flag where just so many were wanted: `most` and `exactly` of `windows_of`."""
    given = getattr(args, flag.removeprefix("--").replace("-", "_"))
    return given, None if isinstance(given, Windows) else flag


def all_there_are(count: int, most: int) -> str:
    """Said of windows where a text has fewer than are taken otherwise."""
    return f", all that it has (of a longer text: {most})" if count < most else ""


def existing(text: str) -> Callable[[str], Path]:
    """A type of argparse: a path that there is; `text` is the flag's help, which may name the verb that writes it."""
    writer = re.search(r"`(kvlab [^`]+)` wrote", text) or re.search(r" of `(kvlab [^`]+)`", text)

    def read(given: str) -> Path:
        """The path, or argparse's error."""
        if (why := absence(given)) is not None:
            hint = f"; run `{writer[1]}`" if writer and why == "no such file" else ""
            raise argparse.ArgumentTypeError(f"cannot read {given}: {why}{hint}")
        return Path(given)

    return read


def model_folder(flag: str, text: str = "of a Hugging Face model", **options) -> Flag:
    """A flag or an argument that names a model's folder; a hub id is told what to do."""
    return flag, {"type": _model_folder, "metavar": "DIR", "help": f"folder {text}"} | options


def _model_folder(given: str) -> Path:
    """A type of argparse: a folder that there is."""
    if not Path(given).is_dir():
        raise argparse.ArgumentTypeError(no_folder(given))
    return Path(given)


def word(flag: str, text: str, **options) -> Flag:
    """A flag that takes one word."""
    return flag, {"help": text} | options


def place(name: str, text: str, **options) -> Flag:
    """A file that is given without a flag."""
    return name, {"type": Path, "metavar": "FILE", "help": text} | options


def with_settings(verbs: Verbs) -> dict[Callable, list[Flag]]:
    """The verbs, each of which also takes the parameters and one of their models, which are read first of all."""
    return {function: [*SETTINGS, read_first, *flags] for function, flags in verbs.items()}


def of_a_model(verbs: Verbs) -> dict[Callable, list[Flag]]:
    """The verbs, each of which takes a model: its folder, or one of params.yaml; it is looked at first of all."""
    return {function: [*SUBJECT, look_first, *flags] for function, flags in verbs.items()}


def look_first(parser: argparse.ArgumentParser) -> None:
    """Have `main` find the model before the verb imports what it runs: a mistake in its name is told at once."""
    parser.set_defaults(first=model_of)


def read_first(parser: argparse.ArgumentParser) -> None:
    """Have `main` read the parameters before the verb imports what it runs: a mistake in them is told at once."""
    parser.set_defaults(first=params_of)


PARAMS = word("--params", f"default: {DEFAULT_PARAMS}", default=DEFAULT_PARAMS, metavar="FILE|JSON")
MODEL = word("--model", "one of `models`; needed where params.yaml lists several", metavar="SLUG")
SETTINGS = [PARAMS, MODEL]
SUBJECT = [
    word("--model", "folder of a Hugging Face model; or one of params.yaml", metavar="DIR|SLUG"),
    word(
        "--params",
        f"for a model that it lists; default: {DEFAULT_PARAMS}, if there is one",
        default=DEFAULT_PARAMS,
        metavar="FILE|JSON",
    ),
]
OUT = result("--out", "what is written (with companions of the same stem beside it)")
WINDOWS = path("--windows", "windows.safetensors of `kvlab step corpus`")
NEEDLES = path("--needles", "needles.parquet of `kvlab step needles`")
SIGMA = path("--sigma", "what `kvlab step sigma` wrote")
CAPTURE = path("--capture", "what `kvlab step capture` wrote")
METRICS = path("--metrics", "what `kvlab step metrics` wrote")
IF_CODED = [  # a run without a codec does without them
    path("--sigma", "what `kvlab step sigma` wrote; needed by cells with a codec", required=False),
    path("--codebooks", "what `kvlab step codebooks` wrote; needed by fitted tables", required=False),
    path("--components", "what `kvlab step components` wrote; needed by klt, oscar and mean removal", required=False),
]
