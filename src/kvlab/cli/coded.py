"""`kvlab recipe`, `encode`, `decode` and `inspect`: a KV cache in few bits, as a file. Heavy imports happen inside."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kvlab.base.errors import StreamError, UserError
from kvlab.cli.flags import CAPTURE, IF_CODED, OUT, SETTINGS, Flag, path, recipe, with_settings, word
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
    """Write the cache of one window of a capture's sample as a coded stream."""
    key = key_of(args)

    from kvlab.cache.streams import describe, encode

    reader = encode(params_of(args), args.recipe, args.capture, args.window, args.out, key)
    print("\n".join(describe(reader)))


def decode_verb(args: argparse.Namespace) -> None:
    """Decode a coded stream into safetensors."""
    refuse_another_format(args.stream)
    key = key_of(args)

    from kvlab.cache.streams import decode

    decode(params_of(args), args.recipe, args.stream, args.out, key)


def inspect_verb(args: argparse.Namespace) -> None:
    """Check a coded stream and say what is in it."""
    refuse_another_format(args.stream)
    key = key_of(args)

    from kvlab.cache.streams import describe
    from kvlab.codec.stream.cache_file import CacheReader

    print("\n".join(describe(CacheReader(args.stream, key))))


def refuse_another_format(file: Path) -> None:
    """`StreamError` for a file that is no coded cache by its first bytes; everything else `CacheReader` says."""
    if file.is_file() and not MAGIC.startswith(begin := file.open("rb").read(len(MAGIC))):
        raise StreamError(f"{file}: this is no coded cache: it begins with {begin!r}, not {MAGIC!r}")


MAGIC = b"KVLS"  # as in `codec.stream.cache_file`
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
            CAPTURE,
            word("--window", "number of the window in the capture's sample", type=int, default=0),
            SIGNING,
            OUT,
        ],
        decode_verb: [RECIPE, STREAM, CHECKING, OUT],
    }
) | {inspect_verb: [*SETTINGS, STREAM, CHECKING]}  # it takes the parameters as the others do, and reads none
