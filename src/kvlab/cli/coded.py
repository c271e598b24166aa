"""`kvlab recipe`, `encode`, `decode` and `inspect`: a KV cache in few bits, as a file. Heavy imports happen inside."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kvlab.base.errors import StreamError, UserError
from kvlab.cli.flags import IF_CODED, OUT, SETTINGS, Flag, path, recipe, with_settings, word
from kvlab.cli.given import fitted_of, params_of
from kvlab.cli.keys import CHECKING, SIGNING, key_of


def recipe_verb(args: argparse.Namespace) -> None:
    """Write the recipe file that encode, decode and the drop-ins read: klt at the bits of params.yaml."""
    from kvlab.base.rungs import STUDIED, default_recipe, labelled
    from kvlab.base.studied import coded_layers

    params = params_of(args)
    recipe = labelled(args.codec, params) if args.codec else default_recipe(params)
    layers, files = None, None
    if args.codec == STUDIED and params.codec.boundary_layers:
        layers = coded_layers(params)
    _refuse_uncalibrated(args, recipe)

    from kvlab.base.model import resolve
    from kvlab.cache.prepared import prepared
    from kvlab.cache.recipe_file import CalibrationFiles, RecipeFile, write_recipe_file

    if fitted_of(args):
        files = CalibrationFiles(sigma=args.sigma, codebooks=args.codebooks, components=args.components)
    # whatever the readers of the file would refuse is refused before it is written
    prepared(RecipeFile(recipe=recipe, layers=layers, calibration=files), resolve(params.model))
    write_recipe_file(args.out, recipe, layers, files)
    print(f"{args.out}: recipe {recipe.recipe_id}")


def _refuse_uncalibrated(args: argparse.Namespace, recipe) -> None:
    """`UserError` names the files that a recipe cannot do without."""
    from kvlab.calibration.needs import needed_files

    missing = [f"--{name} FILE" for name in needed_files(recipe) if getattr(args, name) is None]
    if missing:
        raise UserError(
            f"recipe {recipe.recipe_id} (K {recipe.k.codec}, V {recipe.v.codec}) reads a calibration: name"
            f" {' and '.join(missing)}, or make one file of everything with `kvlab calibrate`"
        )


def encode_verb(args: argparse.Namespace) -> None:
    """Write the cache of one window of a capture's sample as a coded stream; or that of a text as an archive.

    With --text the cache that transformers computes of the text is written by a codec of whole caches, whose
    calibration --recipe names:

      kvlab calibrate --model models/reference --codec archive --bits 2 --out archive.kv
      kvlab encode --recipe archive.kv --text notes.txt --out notes.kva
    """
    if (args.text is None) == (args.capture is None):
        raise UserError("name what is to be coded: --capture FILE, or --text FILE for a codec of whole caches")
    if args.bits is not None and args.capture:
        raise UserError("--bits goes with --text; a recipe for --capture has bits of its own")
    key = key_of(args)
    if args.text:
        archive_text(args, key)
        return

    from kvlab.cache.streams import describe, encode

    reader = encode(params_of(args), args.recipe, args.capture, args.window, args.out, key)
    print("\n".join(describe(reader)))


def archive_text(args: argparse.Namespace, key) -> None:
    """The cache of a text as an archive, and what it is."""
    from kvlab.text.excerpts import read_text

    params, text = params_of(args), read_text(args.text)

    from kvlab.cache.archived import describe, encode_text
    from kvlab.codec.archive.file import load

    data = encode_text(params, args.recipe, text, args.bits, args.dtype, args.out, key)
    print("\n".join([f"{args.out}:", *describe(load(data), len(data))]))


def decode_verb(args: argparse.Namespace) -> None:
    """Decode a coded stream, or an archive, into safetensors."""
    archive = is_archive(args.stream)
    key = key_of(args)
    if archive:
        from kvlab.cache.archived import decode_archive

        decode_archive(params_of(args), args.recipe, args.stream, args.out, key)
        return

    from kvlab.cache.streams import decode

    decode(params_of(args), args.recipe, args.stream, args.out, key)


def inspect_verb(args: argparse.Namespace) -> None:
    """Check a coded stream, or an archive, and say what is in it."""
    archive = is_archive(args.stream)
    key = key_of(args)
    if archive:
        from kvlab.cache.archived import described

        print("\n".join(described(args.stream, key)))
        return

    from kvlab.cache.streams import describe
    from kvlab.codec.stream.cache_file import CacheReader

    print("\n".join(describe(CacheReader(args.stream, key))))


def is_archive(file: Path) -> bool:
    """Whether a file begins as an archive; `StreamError` where it does neither so nor as a coded cache."""
    begin = file.open("rb").read(len(MAGIC)) if file.is_file() else MAGIC
    if not any(magic.startswith(begin) for magic in (MAGIC, ARCHIVE)):
        raise StreamError(f"{file}: this is no coded cache: it begins with {begin!r}, not {MAGIC!r} or {ARCHIVE!r}")
    return begin == ARCHIVE


MAGIC, ARCHIVE = b"KVLS", b"KVLA"  # as in `codec.stream.cache_file` and `codec.archive.file`
WROTE = "what `kvlab recipe` wrote, or `kvlab calibrate`"
RECIPE = path("--recipe", WROTE, type=recipe(WROTE))
STREAM = path("--stream", "what `kvlab encode` wrote")
VERBS: dict[Callable, list[Flag]] = with_settings(
    {
        recipe_verb: [
            word("--codec", "a rung of the ladder, as `hadamard+center`, or `studied`; default: klt"),
            *IF_CODED,
            OUT,
        ],
        encode_verb: [
            RECIPE,
            path("--capture", "what `kvlab step capture` wrote", required=False),
            path("--text", "text whose cache is coded as a whole, UTF-8, in place of --capture", required=False),
            word("--bits", "of an archive, where they are others than its recipe's", type=float, metavar="N"),
            word("--dtype", "of --text's cache; default: float32", choices=("float32", "bfloat16"), default="float32"),
            word("--window", "number of the window in the capture's sample", type=int, default=0),
            SIGNING,
            OUT,
        ],
        decode_verb: [RECIPE, STREAM, CHECKING, OUT],
    }
) | {inspect_verb: [*SETTINGS, STREAM, CHECKING]}  # it takes the parameters as the others do, and reads none
