"""`kvlab calibrate`: one file of everything that a codec reads of a model. Heavy imports happen inside."""

from __future__ import annotations

import argparse

from kvlab.cli.flags import Flag, model_folder, path, result, wanted, whole, window_count, word
from kvlab.core.errors import UserError


def calibrate_verb(args: argparse.Namespace) -> None:
    """Fit a codec to a model and write one file: the recipe, all that it reads of the model, and whose it is.

    transformers (`kvlab.Cache`), vLLM (KVLAB_RECIPE), `kvlab encode`, `decode`, `snapshot`, `eval` and `measure` read
    that file and nothing else. It is fitted to what the model computes on --text, or on docstrings of installed
    packages; of those windows nothing is kept. A codec that is not calibrated gets a file too, of its recipe alone.

      kvlab calibrate --model models/reference --codec klt --bits 4 --out klt4.kv

    --decoder writes another file beside it, of what a machine needs that only decodes: a few times smaller.
    """
    from kvlab.cli.checked import config_of, readable_text, recipe_of, refuse_absent, refuse_long, writable

    config = config_of(args.model)
    refuse_absent(args.engine)
    recipe = recipe_of(args.codec, args.bits, args.v_bits)
    text = readable_text(args.text, args.context, config) if args.text else None
    if args.out.suffix != ".kv":
        raise UserError(f"--out {args.out}; allowed: a name that ends in .kv")
    if args.decoder and args.decoder.suffix != ".kv":
        raise UserError(f"--decoder {args.decoder}; allowed: a name that ends in .kv")
    if args.decoder and args.decoder.resolve() == args.out.resolve():
        raise UserError(f"--out and --decoder are both {args.out}: the second would replace the first; name two files")
    for file in filter(None, (args.out, args.decoder)):
        writable(file)

    from kvlab.calibration.needs import needs_calibration

    needy = any(needs_calibration(stream) for stream in (recipe.k, recipe.v))
    if needy:
        refuse_long(args.context, config)
    about = _fitted(args, recipe, text) if needy else _unfitted(args, recipe)
    for file in filter(None, (args.out, args.decoder)):
        print(f"{file}: recipe {recipe.recipe_id}, {file.stat().st_size} bytes")
    print(about)


def _fitted(args: argparse.Namespace, recipe, text: str | None) -> str:
    """Write the file of a codec that is calibrated; what it was fitted to, in a line."""
    from kvlab.cli.checked import info_of
    from kvlab.cli.fitting import CalibrationText
    from kvlab.engines.registry import start

    info = info_of(args.model)
    source = CalibrationText.read(info, args.text, text, args.context, *wanted(args, "--windows"))
    engine = start(args.engine, info, args.dtype, max_tokens=args.context)
    try:
        _write(args, recipe, source.fit(engine, [recipe]), info, source.tokens)
        return source.about(engine)
    finally:
        engine.close()


def _unfitted(args: argparse.Namespace, recipe) -> str:
    """Write the file of a codec that reads nothing of a model."""
    from kvlab.cli.checked import info_of
    from kvlab.cli.fitting import nothing_fitted

    _write(args, recipe, nothing_fitted(args.engine), info_of(args.model), 0)
    return f"{args.codec} is not calibrated: nothing was fitted, the file holds its recipe"


def _write(args: argparse.Namespace, recipe, calibrated, info, tokens: int) -> None:
    """The file, and that of a decoder where one is asked for."""
    from kvlab.cache.calibration_file import write_calibration

    write_calibration(args.out, recipe, calibrated, info, n_tokens=tokens)
    if args.decoder:
        write_calibration(args.decoder, recipe, calibrated, info, n_tokens=tokens, decoder=True)


FLAGS: list[Flag] = [
    model_folder("--model", required=True),
    path("--text", "text to calibrate on, UTF-8; default: docstrings of installed packages", required=False),
    word("--codec", "klt, oscar, hadamard+center, ...; default: klt", default="klt"),
    word("--bits", "of K and of V; default: 4", type=float, metavar="N"),
    word("--v-bits", "of V, where they are others", type=float, metavar="N"),
    word("--engine", "default: hf", choices=("hf", "vllm"), default="hf"),
    word(
        "--dtype", "what the engine computes in; default: float32", choices=("float32", "bfloat16"), default="float32"
    ),
    word("--context", "tokens of a window; default: 512", type=whole(8), default=512, metavar="N"),
    window_count("--windows", "so many, spread over the text", 32),
    result("--out", "the file, such as klt4.kv"),
    result("--decoder", "also write what decodes alone here, such as klt4-decoder.kv", required=False),
]
