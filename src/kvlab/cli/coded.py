"""`kvlab recipe`, `encode`, `decode` and `inspect`: a KV cache in few bits, as a file. Heavy imports happen inside."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kvlab.cli.flags import IF_CODED, OUT, SUBJECT, Flag, cached, of_a_model, path, recipe, result, word
from kvlab.cli.given import bits_of, fitted_of, folder_of, model_of, params_of
from kvlab.cli.keys import CHECKING, SIGNING, key_of
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import ParamsError, StreamError, UserError
from kvlab.core.filekind import ARCHIVE, CODED, FRONT, kind_of, magic_of


def recipe_verb(args: argparse.Namespace) -> None:
    """Write the recipe file that encode, decode and the drop-ins read.

    It names a codec, its bits, and where a calibration of the pipeline lies. One file that holds the calibration
    itself is what `kvlab calibrate` makes.

      kvlab recipe --model models/reference --codec hadamard --bits 4 --out hadamard4.json
    """
    model, recipe, layers = _asked(args)
    files = None
    _refuse_uncalibrated(args, recipe)

    from kvlab.cache.prepared import prepared
    from kvlab.cache.recipe_file import CalibrationFiles, RecipeFile, write_recipe_file
    from kvlab.core.model import resolve

    if fitted_of(args):
        files = CalibrationFiles(sigma=args.sigma, codebooks=args.codebooks, components=args.components)
    # whatever the readers of the file would refuse is refused before it is written
    prepared(RecipeFile(recipe=recipe, layers=layers, calibration=files), resolve(model))
    write_recipe_file(args.out, recipe, layers, files)
    print(f"{args.out}: recipe {recipe.recipe_id}")


def _asked(args: argparse.Namespace):
    """The model, the recipe that --codec and --bits name, and the coded layers (None: all).

    Of a model in a folder the recipe is that of `kvlab.recipe`, of one of params.yaml that of its ladder.
    """
    from pydantic import ValidationError

    from kvlab.cli.checked import recipe_of
    from kvlab.codecs.block.studied import coded_layers
    from kvlab.codecs.recipes import STUDIED

    codec, folder = args.codec, folder_of(args)
    if folder is not None:
        codec = codec or "klt"
        if codec == STUDIED:
            raise UserError(f"--codec {STUDIED} is described in params.yaml; name it there, or give another codec")
        return folder, recipe_of(codec, args.bits, args.v_bits), None
    params = bits_of(args, params_of(args))
    try:
        recipe = named_recipe(codec, params=params) if codec else named_recipe("klt", params=params)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ParamsError(f"codec {codec or 'klt'!r}: {where} {problem['input']!r}: {problem['msg']}") from None
    only_some = codec == STUDIED and params.codec.boundary_layers
    return params.model, recipe, coded_layers(params) if only_some else None


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
    """Write the KV cache of a text in few bits, as a file.

    transformers computes the cache of --text, and the codec of --recipe codes it: a codec of whole caches, such as
    `archive`, into an archive, any other into a coded cache. `kvlab decode` gives its tensors back.

      kvlab calibrate --model models/reference --codec klt --bits 4 --out klt4.kv
      kvlab encode --model models/reference --recipe klt4.kv --text notes.txt --out notes.kvls
      kvlab decode --model models/reference --recipe klt4.kv --stream notes.kvls --out notes.safetensors

    With --capture it is the cache of a window that the pipeline keeps a sample of.
    """
    if (args.text is None) == (args.capture is None):
        raise UserError("name what is to be coded: --text FILE, or --capture FILE of the pipeline")
    if args.bits is not None and args.capture:
        raise UserError("--bits goes with --text; a recipe for --capture has bits of its own")
    if args.window is not None and args.text:
        raise UserError("--window goes with --capture; of --text the whole cache is coded")
    key = key_of(args)
    if args.text:
        _encode_text(args, key)
        return

    from kvlab.cache.streams import describe, encode

    reader = encode(model_of(args), args.recipe, args.capture, args.window or 0, args.out, key)
    print("\n".join(describe(reader)))


def _encode_text(args: argparse.Namespace, key) -> None:
    """Code the cache of a text as its codec does, and say what was written."""
    from kvlab.text.excerpts import read_text

    model, text = model_of(args), read_text(args.text)

    from kvlab.cache import archived, streams
    from kvlab.cache.recipe_file import read_recipe_file
    from kvlab.codecs.archive.file import load
    from kvlab.core.recipe import WHOLE

    own = read_recipe_file(args.recipe).recipe.k
    if own.codec in WHOLE:
        data = archived.encode_text(model, args.recipe, text, args.bits, args.dtype, args.out, key)
        print("\n".join([f"{args.out}:", *archived.describe(load(data), len(data))]))
        return
    if args.bits is not None:
        raise UserError(f"--bits {args.bits:g}: those of codec {own.codec!r} are its recipe's; leave --bits out")
    print("\n".join(streams.describe(streams.encode_text(model, args.recipe, text, args.dtype, args.out, key))))


def decode_verb(args: argparse.Namespace) -> None:
    """Decode what `kvlab encode` wrote into safetensors: layer_0_k, layer_0_v, ... [heads, tokens, head_dim].

    K is the one before its rotary embedding, unless the recipe codes it after (`rotary` in the file's header).

      kvlab decode --model models/reference --recipe klt4.kv --stream notes.kvls --out notes.safetensors
    """
    archive = is_archive(args.stream)
    key = key_of(args)
    if archive:
        from kvlab.cache.archived import decode_archive

        decode_archive(model_of(args), args.recipe, args.stream, args.out, key)
        return

    from kvlab.cache.streams import decode

    decode(model_of(args), args.recipe, args.stream, args.out, key)


def inspect_verb(args: argparse.Namespace) -> None:
    """Check a coded stream, or an archive, and say what is in it."""
    archive = is_archive(args.stream)
    key = key_of(args)
    if archive:
        from kvlab.cache.archived import described

        print("\n".join(described(args.stream, key)))
        return

    from kvlab.cache.streams import describe
    from kvlab.codecs.stream.cache_file import CacheReader

    print("\n".join(describe(CacheReader(args.stream, key))))


def is_archive(file: Path) -> bool:
    """Whether a file begins as an archive; `StreamError` where it does neither so nor as a coded cache."""
    begin = file.open("rb").read(FRONT) if file.is_file() else CODED
    cut_off = any(magic.startswith(begin) for magic in (CODED, ARCHIVE))
    if not cut_off and magic_of(begin) not in (CODED, ARCHIVE):
        kind = f"this is {kind_of(begin)}, and no coded cache" if kind_of(begin) else "this is no coded cache"
        raise StreamError(f"{file}: {kind}: it begins with {begin[:4]!r}, not {CODED!r} or {ARCHIVE!r}")
    return magic_of(begin) == ARCHIVE


WROTE = "what `kvlab recipe` wrote, or `kvlab calibrate`"
RECIPE = path("--recipe", WROTE, type=recipe(WROTE))
STREAM = path("--stream", "what `kvlab encode` wrote")
VERBS: dict[Callable, list[Flag]] = of_a_model(
    {
        recipe_verb: [
            word("--codec", "hadamard, int+center, ...; of params.yaml also `studied`; default: klt"),
            word("--bits", "of K and of V; default: 4, or those of params.yaml", type=float, metavar="N"),
            word("--v-bits", "of V, where they are others", type=float, metavar="N"),
            *IF_CODED,
            OUT,
        ],
        encode_verb: [
            RECIPE,
            path("--text", "text whose cache is coded, UTF-8", required=False),
            path("--capture", "instead of --text: what `kvlab step capture` wrote", required=False),
            word("--bits", "of an archive, where they are others than its recipe's", type=float, metavar="N"),
            word("--dtype", "of --text's cache; default: float32", choices=("float32", "bfloat16"), default="float32"),
            word("--window", "number of the window in the capture's sample; default: 0", type=int, metavar="N"),
            SIGNING,
            result("--out", "the coded cache, as notes.kvls, or the archive, as notes.kva", type=cached(".kvls")),
        ],
        decode_verb: [RECIPE, STREAM, CHECKING, OUT],
    }
) | {inspect_verb: [*SUBJECT, STREAM, CHECKING]}  # it takes a model as the others do, and reads none
