"""`kvlab recipe`, `encode`, `decode` and `inspect`: a KV cache in few bits, as a file. Heavy imports happen inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvlab.cli.flags import (
    CHECKING,
    DTYPES,
    SIGNING,
    WROTE,
    CodebooksIfCoded,
    ComponentsIfCoded,
    Out,
    SigmaIfCoded,
    cached,
    choice,
    number,
    path,
    recipe,
    result,
    word,
)
from kvlab.cli.given import (
    DEFAULT_PARAMS,
    AnyModel,
    IfListed,
    OfModel,
    bits_of,
    fitted_of,
    folder_of,
    key_of,
    params_of,
)
from kvlab.core.errors import ParamsError, StreamError, UserError
from kvlab.core.filekind import ARCHIVE, CODED, FRONT, is_tensors, kind_of, magic_of
from kvlab.core.params import Model

Recipe = Annotated[Path, recipe(WROTE)]
Stream = Annotated[Path, path("what `kvlab encode` wrote")]
Key = Annotated[Path | None, CHECKING]


def recipe_verb(
    out: Out,
    model: AnyModel = None,
    params: IfListed = DEFAULT_PARAMS,
    codec: Annotated[str | None, word("hadamard, int+center, ...; of params.yaml also `studied`; default: klt")] = None,
    bits: Annotated[float | None, number("of K and of V; default: 4, or those of params.yaml", float)] = None,
    v_bits: Annotated[float | None, number("of V, where they are others", float)] = None,
    sigma: SigmaIfCoded = None,
    codebooks: CodebooksIfCoded = None,
    components: ComponentsIfCoded = None,
) -> None:
    """Write the recipe file that encode, decode and the drop-ins read.

    It names a codec, its bits, and where a calibration of the pipeline lies. One file that holds the calibration
    itself is what `kvlab calibrate` makes.

      kvlab recipe --model models/reference --codec hadamard --bits 4 --out hadamard4.json
    """
    subject, recipe, layers = _from_flags(model, params, codec, bits, v_bits)
    given, files = {"sigma": sigma, "codebooks": codebooks, "components": components}, None
    _refuse_uncalibrated(given, recipe)

    from kvlab.cache.files.prepared import prepared
    from kvlab.cache.files.recipe import CalibrationFiles, RecipeFile, write_recipe_file
    from kvlab.core.model import resolve

    if fitted_of(**given):
        files = CalibrationFiles(**given)
    # whatever the readers of the file would refuse is refused before it is written
    prepared(RecipeFile(recipe=recipe, layers=layers, calibration=files), resolve(subject))
    write_recipe_file(out, recipe, layers, files)
    print(f"{out}: recipe {recipe.recipe_id}")


def _from_flags(model: str | None, params: str, codec: str | None, bits: float | None, v_bits: float | None):
    """The model, the recipe that --codec and --bits name, and the coded layers (None: all).

    Of a model in a folder the recipe is that of `kvlab.recipe`, of one of params.yaml that of its ladder.
    """
    from pydantic import ValidationError

    from kvlab.cli.checked import recipe_of
    from kvlab.codecs.block.studied import coded_layers
    from kvlab.codecs.recipes import STUDIED, named_recipe

    folder = folder_of(model, params)
    if folder is not None:
        codec = codec or "klt"
        if codec == STUDIED:
            raise UserError(f"--codec {STUDIED} is described in params.yaml; name it there, or give another codec")
        return folder, recipe_of(codec, bits, v_bits), None
    listed = bits_of(params_of(params, model), bits, v_bits)
    try:
        recipe = named_recipe(codec or "klt", params=listed)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ParamsError(f"codec {codec or 'klt'!r}: {where} {problem['input']!r}: {problem['msg']}") from None
    only_some = codec == STUDIED and listed.codec.boundary_layers
    return listed.model, recipe, coded_layers(listed) if only_some else None


def _refuse_uncalibrated(given: dict[str, Path | None], recipe) -> None:
    """`UserError` names the files that a recipe cannot do without."""
    from kvlab.calibration.needs import needed_files

    missing = [f"--{name} FILE" for name in needed_files(recipe) if given[name] is None]
    if missing:
        raise UserError(
            f"recipe {recipe.recipe_id} (K {recipe.k.codec}, V {recipe.v.codec}) reads a calibration: name"
            f" {' and '.join(missing)}, or make one file of everything with `kvlab calibrate`"
        )


def encode_verb(
    model: OfModel,
    recipe: Recipe,
    out: Annotated[Path, result("the coded cache, as notes.kvls, or the archive, as notes.kva", read=cached(".kvls"))],
    text: Annotated[Path | None, path("text whose cache is coded, UTF-8")] = None,
    capture: Annotated[Path | None, path("instead of --text: what `kvlab step capture` wrote")] = None,
    bits: Annotated[float | None, number("of an archive, where they are others than its recipe's", float)] = None,
    dtype: Annotated[str, choice("of --text's cache; default: float32", DTYPES)] = "float32",
    window: Annotated[int | None, number("number of the window in the capture's sample; default: 0")] = None,
    key: Annotated[Path | None, SIGNING] = None,
) -> None:
    """Write the KV cache of a text in few bits, as a file.

    transformers computes the cache of --text, and the codec of --recipe codes it: a codec of whole caches, such as
    `archive`, into an archive, any other into a coded cache. `kvlab decode` gives its tensors back.

      kvlab calibrate --model models/reference --codec klt --bits 4 --out klt4.kv
      kvlab encode --model models/reference --recipe klt4.kv --text notes.txt --out notes.kvls
      kvlab decode --model models/reference --recipe klt4.kv --stream notes.kvls --out notes.safetensors

    With --capture it is the cache of a window that the pipeline keeps a sample of.
    """
    if (text is None) == (capture is None):
        raise UserError("name what is to be coded: --text FILE, or --capture FILE of the pipeline")
    if bits is not None and capture:
        raise UserError("--bits goes with --text; a recipe for --capture has bits of its own")
    if window is not None and text:
        raise UserError("--window goes with --capture; of --text the whole cache is coded")
    key = key_of(key)
    if text:
        _encode_text(model, recipe, text, bits, dtype, out, key)
        return

    from kvlab.cache.files.coded import describe, encode

    reader = encode(model, recipe, capture, window or 0, out, key)
    print("\n".join(describe(reader)))


def _encode_text(model: Model, recipe: Path, file: Path, bits: float | None, dtype: str, out: Path, key) -> None:
    """Code the cache of a text as its codec does, and say what was written."""
    from kvlab.text.excerpts import read_text

    text = read_text(file)

    from kvlab.cache.files import archived
    from kvlab.cache.files import coded as streams
    from kvlab.cache.files.recipe import read_recipe_file
    from kvlab.codecs.archive.file import load
    from kvlab.core.recipe import WHOLE

    own = read_recipe_file(recipe).recipe.k
    if own.codec in WHOLE:
        data = archived.encode_text(model, recipe, text, bits, dtype, out, key)
        print("\n".join([f"{out}:", *archived.describe(load(data), len(data))]))
        return
    if bits is not None:
        raise UserError(f"--bits {bits:g}: those of codec {own.codec!r} are its recipe's; leave --bits out")
    print("\n".join(streams.describe(streams.encode_text(model, recipe, text, dtype, out, key))))


def decode_verb(model: OfModel, recipe: Recipe, stream: Stream, out: Out, key: Key = None) -> None:
    """Decode what `kvlab encode` wrote into safetensors.

    Its tensors are layer_0_k, layer_0_v, ... [heads, tokens, head_dim]. K is the one before its rotary embedding,
    unless the recipe codes it after (`rotary` in the file's header).

      kvlab decode --model models/reference --recipe klt4.kv --stream notes.kvls --out notes.safetensors
    """
    archive = is_archive(stream)
    key = key_of(key)
    if archive:
        from kvlab.cache.files.archived import decode_archive

        decode_archive(model, recipe, stream, out, key)
        return

    from kvlab.cache.files.coded import decode

    decode(model, recipe, stream, out, key)


def inspect_verb(
    stream: Annotated[Path, path("what `kvlab encode` wrote, or `kvlab calibrate`")],
    model: AnyModel = None,
    params: IfListed = DEFAULT_PARAMS,
    key: Key = None,
) -> None:
    """Check a coded cache, an archive or a codec's file, and say what is in it.

    --model and --params are taken as the other verbs take them, and not read.
    """
    key = key_of(key)
    if stream.is_file() and is_tensors(stream.open("rb").read(FRONT)):
        if key is not None:
            raise UserError(f"{stream} is the file of a codec, which nobody signs; leave --key out")

        from kvlab.cache.files.calibration import described as codec_lines

        print("\n".join(codec_lines(stream)))
        return
    archive = is_archive(stream)
    if archive:
        from kvlab.cache.files.archived import described

        print("\n".join(described(stream, key)))
        return

    from kvlab.cache.files.coded import describe
    from kvlab.codecs.stream.cache_file import CacheReader

    print("\n".join(describe(CacheReader(stream, key))))


def is_archive(file: Path) -> bool:
    """Whether a file begins as an archive; `StreamError` where it does neither so nor as a coded cache."""
    begin = file.open("rb").read(FRONT) if file.is_file() else CODED
    cut_off = any(magic.startswith(begin) for magic in (CODED, ARCHIVE))
    if not cut_off and magic_of(begin) not in (CODED, ARCHIVE):
        kind = f"this is {kind_of(begin)}, and no coded cache" if kind_of(begin) else "this is no coded cache"
        raise StreamError(f"{file}: {kind}: it begins with {begin[:4]!r}, not {CODED!r} or {ARCHIVE!r}")
    return magic_of(begin) == ARCHIVE
