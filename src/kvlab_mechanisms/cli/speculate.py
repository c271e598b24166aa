"""`kvlab speculate`: how much of what a model drafts over its coded cache it accepts. Heavy imports happen inside."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from time import perf_counter

from kvlab.cli.flags import Flag, all_there_are, model_folder, path, result, wanted, whole, window_count, word
from kvlab.core.errors import UserError
from kvlab.output.terminal import as_text

COLUMNS = ("codec", "bits/value", "accepted, expected", "by position", "tokens per call", "seconds")


def speculate_verb(args: argparse.Namespace) -> None:
    """Measure self-speculation: the model drafts over its coded cache, and verifies with the exact one.

    The text is cut into prompts, and the model writes on after each. What it writes has the law of the exact cache
    whatever the codec; the codec decides how much of a draft is accepted. The share that is to be expected is
    1 - TV(p, q), of the law p over the exact and q over the coded cache.

      kvlab speculate models/reference --codec hadamard kivi --bits 2 4 --text notes.txt
    """
    from kvlab.cli import checked

    config = checked.config_of(args.model)
    if args.temperature < 0:
        raise UserError(f"--temperature {args.temperature:g}; allowed: a number from 0")
    named = checked.all_recipes_of(args.codec, args.bits)
    text = checked.readable_text(args.text, args.context + args.tokens, config)
    checked.calibration_file(args.calibration)
    checked.writable(args.json)
    found = _measured(args, named, text)
    if args.json:
        from kvlab.core.records import write_json

        write_json(args.json, found)
    print("\n".join(said(found)))


def _measured(args: argparse.Namespace, named: list, text: str) -> dict:
    """Plain texts, then each codec's acceptance; for programs."""
    from kvlab.cache.calibration_file import load_calibration
    from kvlab.cli.checked import info_of
    from kvlab.core.model import load_tokenizer
    from kvlab.core.records import versions
    from kvlab.engines.registry import start
    from kvlab.text.excerpts import windows_of
    from kvlab_mechanisms.decoding.acceptance import acceptance, plain_texts
    from kvlab_mechanisms.decoding.law import Sampling

    info = info_of(args.model)
    most, exactly = wanted(args, "--windows")
    prompts = windows_of([text], load_tokenizer(info), args.context, most, str(args.text), exactly=exactly).tolist()
    stored = load_calibration(args.calibration, info) if args.calibration else None
    own, rows = Sampling(args.temperature, seed=args.seed), []
    engine = start("hf", info, args.dtype, max_tokens=args.context + args.tokens)
    try:
        began = perf_counter()
        plain = plain_texts(engine.model, prompts, args.tokens, own)
        plain_seconds = perf_counter() - began
        for one in named:
            done = acceptance(
                engine.model, prompts, one.recipe, own, tokens=args.tokens, draft=args.draft, calibration=stored,
                greedy=plain if args.temperature == 0 else None,
            )  # fmt: skip
            rows.append(
                {
                    "codec": one.label,
                    "recipe_id": one.recipe.recipe_id,
                    "bits_per_value": done.bits_per_value,
                    "alpha": done.report.alpha,
                    "by_position": done.report.by_position,
                    "tokens_per_call": done.report.tokens_per_call,
                    "calls": len(done.report.accepted),
                    "seconds": done.seconds,
                }
            )
    finally:
        engine.close()
    asked = ("context", "tokens", "draft", "temperature", "seed", "dtype")
    facts = {"model": str(args.model), "model_hash": info.model_hash, "text": str(args.text)}
    facts |= {"prompts": len(prompts), "prompts_wanted": most}
    facts |= {name: getattr(args, name) for name in asked} | {"plain_seconds": plain_seconds}
    return facts | {"versions": versions(), "rows": rows}


def said(found: dict) -> Iterator[str]:
    """What was found, for people."""
    short = all_there_are(found["prompts"], found["prompts_wanted"])
    yield (
        f"{found['model']}, {found['dtype']}: {found['prompts']} prompts of {found['context']} tokens of"
        f" {found['text']}{short}, {found['tokens']} written after each, drafts of {found['draft']}, temperature"
        f" {found['temperature']:g}"
    )
    if found["temperature"] == 0:
        yield "every text is the plain greedy one, token for token but for ties in rounding"
    yield ""
    yield as_text([_row(row) for row in found["rows"]], COLUMNS, "table")
    yield ""
    yield f"without a drafter: 1 token per call, {found['plain_seconds']:.0f} seconds"


def _row(row: dict) -> dict:
    return {
        "codec": row["codec"],
        "bits/value": f"{row['bits_per_value']:.2f}",
        "accepted, expected": f"{row['alpha']:.3f}",
        "by position": " ".join(f"{rate:.2f}" for rate in row["by_position"]),
        "tokens per call": f"{row['tokens_per_call']:.2f}",
        "seconds": f"{row['seconds']:.0f}",
    }


FLAGS: list[Flag] = [
    model_folder("model"),
    word("--codec", "hadamard, kivi, int+center, ...; several may be named; default: hadamard", nargs="+",
         default=["hadamard"]),
    word("--bits", "bits of K and of V, each measured; default: 4", type=float, nargs="+", metavar="N"),
    path("--text", "the text whose parts are prompts, UTF-8"),
    word("--context", "tokens of a prompt; default: 256", type=whole(8), default=256, metavar="N"),
    word("--tokens", "written after each; default: 64", type=whole(2), default=64, metavar="N"),
    word("--draft", "tokens of a draft, at most; default: 4", type=whole(1), default=4, metavar="N"),
    window_count("--windows", "so many prompts, spread over the text", 4),
    word("--temperature", "0 is greedy; default: 1", type=float, default=1.0, metavar="T"),
    word("--seed", "of the random numbers; default: 0", type=whole(0), default=0, metavar="N"),
    word(
        "--dtype", "what the engine computes in; default: float32", choices=("float32", "bfloat16"), default="float32"
    ),
    path("--calibration", "what `kvlab calibrate` wrote", required=False),
    result("--json", "everything that was found, for programs", required=False),
]  # fmt: skip
