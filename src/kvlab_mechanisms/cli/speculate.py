"""`kvlab speculate`: how much of what a model drafts over its coded cache it accepts. Heavy imports happen inside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Annotated

from kvlab.cli.flags import (
    EVERYTHING,
    Dtype,
    Most,
    model_folder,
    most_windows,
    number,
    path,
    whole,
    window_count,
    word,
)
from kvlab.core.errors import UserError
from kvlab.output.terminal import all_there_are, as_text

COLUMNS = ("codec", "bits/value", "accepted, expected", "by position", "tokens per call", "seconds")
MOST = Most(4)


def speculate_verb(
    model: Annotated[Path, model_folder(argument=True)],
    *,
    codec: Annotated[
        list[str], word("hadamard, kivi, int+center, ...; several may be named; default: hadamard", metavar="CODEC ...")
    ] = ("hadamard",),
    bits: Annotated[list[float], number("bits of K and of V, each measured; default: 4", float, metavar="N ...")] = (),
    text: Annotated[Path, path("the text whose parts are prompts, UTF-8")],
    context: Annotated[int, number("tokens of a prompt; default: 256", whole(8))] = 256,
    tokens: Annotated[int, number("written after each; default: 64", whole(2))] = 64,
    draft: Annotated[int, number("tokens of a draft, at most; default: 4", whole(1))] = 4,
    windows: Annotated[int, window_count("so many prompts, spread over the text", MOST)] = MOST,
    temperature: Annotated[float, number("0 is greedy; default: 1", float, metavar="T")] = 1.0,
    seed: Annotated[int, number("of the random numbers; default: 0", whole(0))] = 0,
    dtype: Dtype = "float32",
    calibration: Annotated[Path | None, path("what `kvlab calibrate` wrote")] = None,
    json: Annotated[Path | None, EVERYTHING] = None,
) -> None:
    """Measure how much of what a model drafts over its coded cache it accepts.

    This is self-speculation: the model verifies its draft with the exact cache. The text is cut into prompts, and the
    model writes on after each. What it writes has the law of the exact cache whatever the codec; the codec decides how
    much of a draft is accepted. The share that is to be expected is 1 - TV(p, q), of the law p over the exact and q
    over the coded cache.

      kvlab speculate models/reference --codec hadamard kivi --bits 2 4 --text notes.txt
    """
    args = SimpleNamespace(**locals())  # what was asked for, for the functions below

    from kvlab.cli import checked

    config = checked.config_of(model)
    if temperature < 0:
        raise UserError(f"--temperature {temperature:g}; allowed: a number from 0")
    named = checked.all_recipes_of(codec, bits)
    written = checked.readable_text(text, context + tokens, config)
    checked.calibration_file(calibration)
    checked.writable(json)
    found = _measured(args, named, written)
    if json:
        from kvlab.core.records import write_json

        write_json(json, found)
    print("\n".join(report_lines(found)))


def _measured(args: SimpleNamespace, named: list, text: str) -> dict:
    """Plain texts, then each codec's acceptance; for programs."""
    from kvlab.cache.files.calibration import load_calibration
    from kvlab.cli.checked import info_of
    from kvlab.core.model import load_tokenizer
    from kvlab.core.records import versions
    from kvlab.engines.registry import start
    from kvlab.text.excerpts import windows_of
    from kvlab_mechanisms.decoding.acceptance import acceptance, plain_texts
    from kvlab_mechanisms.decoding.law import Sampling

    info = info_of(args.model)
    most, exactly = most_windows(args.windows, "--windows")
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


def report_lines(found: dict) -> Iterator[str]:
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
