"""`kvlab calibrate`: one file of everything that a codec reads of a model. Heavy imports happen inside."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from kvlab.cli.flags import (
    Dtype,
    Engine,
    Most,
    choice,
    model_folder,
    most_windows,
    number,
    path,
    result,
    whole,
    window_count,
    word,
)
from kvlab.codecs.recipes import ROTARIES
from kvlab.core.errors import UserError

MOST = Most(32)


def calibrate_verb(
    model: Annotated[Path, model_folder()],
    out: Annotated[Path, result("the file, such as klt4.kv")],
    text: Annotated[Path | None, path("text to calibrate on, UTF-8; default: docstrings of installed packages")] = None,
    codec: Annotated[str, word("klt, oscar, hadamard+center, ...; default: klt")] = "klt",
    bits: Annotated[float | None, number("of K and of V; default: 4", float)] = None,
    v_bits: Annotated[float | None, number("of V, where they are others", float)] = None,
    sink: Annotated[int, number("first tokens of a sequence that stay exact; default: 0", whole(0))] = 0,
    recent: Annotated[int, number("newest tokens that stay exact; default: 0", whole(0))] = 0,
    rotary: Annotated[str | None, choice("where K is coded; default: before, or as published", ROTARIES)] = None,
    engine: Engine = "hf",
    dtype: Dtype = None,
    context: Annotated[int, number("tokens of a window; default: 512", whole(8))] = 512,
    windows: Annotated[int, window_count("so many, spread over the text", MOST)] = MOST,
    decoder: Annotated[Path | None, result("also write what decodes alone here, such as klt4-decoder.kv")] = None,
) -> None:
    """Fit a codec to a model: one file for transformers, vLLM, encode and snapshot.

    It holds the recipe, all that it reads of the model, and whose it is. transformers (`kvlab.Cache`), vLLM
    (KVLAB_RECIPE), `kvlab encode`, `decode`, `snapshot`, `eval` and `measure` read that file and nothing else. It is
    fitted to what the model computes on --text, or on docstrings of installed packages; of those windows nothing is
    kept. A codec that is not calibrated gets a file too, of its recipe alone.

      kvlab calibrate --model models/reference --codec klt --bits 4 --out klt4.kv

    --sink 4 --recent 128 keep these tokens exact: what is lost while text is written is mostly lost on the newest.
    --rotary after makes steps shorter and loses more; `kvlab.Cache` and vLLM with coded pages (KVLAB_PAGES) read it,
    and nothing else. It codes without escapes.
    --decoder writes another file beside it, of what a machine needs that only decodes: a few times smaller.
    """
    args = SimpleNamespace(**locals())  # what was asked for, for the functions below

    from kvlab.cli.checked import config_of, dtype_of, readable_text, recipe_of, refuse_absent, refuse_long, writable

    config = config_of(args.model)
    args.dtype = dtype_of(args.dtype, config)
    refuse_absent(args.engine)
    ends = {name: count for name, count in (("sink", args.sink), ("recent", args.recent)) if count}
    recipe = recipe_of(args.codec, args.bits, args.v_bits, rotary=args.rotary, **ends)
    text = readable_text(args.text, args.context, config) if args.text else None
    if args.out.suffix != ".kv":
        raise UserError(f"--out {args.out}; allowed: a name that ends in .kv")
    if args.decoder and args.decoder.suffix != ".kv":
        raise UserError(f"--decoder {args.decoder}; allowed: a name that ends in .kv")
    if args.decoder and args.decoder.resolve() == args.out.resolve():
        raise UserError(f"--out and --decoder are both {args.out}: the second would replace the first; name two files")
    for file in filter(None, (args.out, args.decoder)):
        writable(file)

    from kvlab.calibration.needs import needs_calibration, reads_weights_alone

    weights = reads_weights_alone(recipe)
    needy = not weights and any(needs_calibration(stream) for stream in (recipe.k, recipe.v))
    if needy:
        refuse_long(args.context, config)
    about = _fitted(args, recipe, text) if needy else _unfitted(args, recipe, weights)
    for file in filter(None, (args.out, args.decoder)):
        print(f"{file}: recipe {recipe.recipe_id}, {file.stat().st_size} bytes")
    print(about)


def _fitted(args: SimpleNamespace, recipe, text: str | None) -> str:
    """Write the file of a codec that is calibrated; what it was fitted to, in a line."""
    from kvlab.calibration.fitting import CalibrationText
    from kvlab.cli.checked import info_of
    from kvlab.engines.registry import start

    info = info_of(args.model)
    source = CalibrationText.read(info, args.text, text, args.context, *most_windows(args.windows, "--windows"))
    engine = start(args.engine, info, args.dtype, max_tokens=args.context)
    try:
        _write(args, recipe, source.fit(engine, [recipe]), info, source.tokens)
        return source.about(engine)
    finally:
        engine.close()


def _unfitted(args: SimpleNamespace, recipe, weights: bool) -> str:
    """Write the file of a codec that reads nothing of a model, or its weights alone."""
    from kvlab.calibration.biases import of_biases
    from kvlab.calibration.load import Calibrated
    from kvlab.cli.checked import info_of

    if weights:
        info = info_of(args.model)
        _write(args, recipe, of_biases(info, args.context, args.engine), info, 0)
        return f"{args.codec} reads the model's biases: no text was needed, the file holds them"
    none = Calibrated(whiteners={}, tables={}, origin=args.engine, corpus_hash="", sigma_hash="", calibration_hash="")
    _write(args, recipe, none, info_of(args.model), 0)
    return f"{args.codec} is not calibrated: nothing was fitted, the file holds its recipe"


def _write(args: SimpleNamespace, recipe, calibrated, info, tokens: int) -> None:
    """The file, and that of a decoder where one is asked for."""
    from kvlab.cache.files.calibration import write_calibration

    write_calibration(args.out, recipe, calibrated, info, n_tokens=tokens)
    if args.decoder:
        write_calibration(args.decoder, recipe, calibrated, info, n_tokens=tokens, decoder=True)
