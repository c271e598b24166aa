"""`kvlab recommend` and `kvlab check`: which cache format to take, without params.yaml. Heavy imports happen inside."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from kvlab.advice.serving import DEVICES, CacheFormat, OwnFormat, ServingEngine
from kvlab.advice.serving_engines import SERVING
from kvlab.advice.verdicts import LOSSES, OPEN, answer, bound, verdict
from kvlab.cli.calibrate import MOST as MOST_CALIB
from kvlab.cli.flags import (
    EVERYTHING,
    Dtype,
    Most,
    choice,
    model_folder,
    most_windows,
    number,
    path,
    result,
    switch,
    whole,
    window_count,
    word,
)
from kvlab.cli.measure import MIB, in_digits
from kvlab.core.errors import UnknownName, UserError
from kvlab.output.terminal import as_text, printable

MOST, MOST_CHECKED = Most(16), Most(12)
COLUMNS = ("format", "engines", "bits", "KL", "95 %", "median", "99 %", "99.9 %", "same top token")
Device = Annotated[str, choice("what the engine runs on; default: cuda", DEVICES)]
Context = Annotated[int, number("tokens of a window that are coded; default: 512", whole(8))]
Eval = Annotated[int, number("tokens after them that are predicted; default: 128", whole(2))]
NoWitness = Annotated[bool, switch("compute nothing a second time: spares its time", "--no-witness")]


def recommend_verb(
    model: Annotated[Path, model_folder(argument=True)],
    *,
    text: Annotated[Path, path("the text that is predicted, UTF-8")],
    engine: Annotated[
        list[str],
        choice(
            f"the engine that you serve with: {', '.join(SERVING)}; default: all of them",
            tuple(SERVING),
            metavar="NAME ...",
        ),
    ] = (),
    device: Device = "cuda",
    loss: Annotated[str | None, choice("how much may be lost, at the fewest bits; default: small", LOSSES)] = None,
    bits: Annotated[
        float | None, number("instead: the least loss within so many bits per value", float, metavar="N")
    ] = None,
    calib_text: Annotated[
        Path | None, path("text that kvlab's own codecs are fitted to; default: docstrings of installed packages")
    ] = None,
    tokens: Annotated[int | None, number("memory is told of so many; default: the model's positions", whole(1))] = None,
    dtype: Dtype = None,
    context: Context = 512,
    eval: Eval = 128,
    windows: Annotated[int, window_count("so many, spread over the text; half choose, half confirm", MOST)] = MOST,
    no_witness: NoWitness = False,
    json: Annotated[Path | None, EVERYTHING] = None,
    html: Annotated[Path | None, result("the same as a page for people, one file that needs no other")] = None,
) -> None:
    """Say which cache format to take, on your model, in the engine that you serve with.

    Every format that the engine has for such a model and device is measured on your text: over the cache of each
    window, whose exact prefix is computed once for all of them. On half of the windows one is chosen: of the fewest
    bits whose loss is surely no more than --loss, or with --bits the least loss within these bits. It is measured
    again as its engine reads it, where a prompt's own tokens read coded K and V too. Where vLLM can leave layers in
    16 bits, those that carry the loss are looked for. What is chosen is measured on the other half, which chose
    nothing: that interval stands by the line to paste.

      kvlab recommend models/reference --text notes.txt --engine vllm
    """
    args = SimpleNamespace(**locals(), calib_windows=MOST_CALIB)  # what was asked for, for what measures it
    args.windows, args.exactly = most_windows(windows, "--windows")

    from kvlab.advice.choice import LossWish
    from kvlab.cli import checked

    if loss and bits is not None:
        raise UserError(f"--loss {loss} and --bits {bits:g} are two wishes; give one of them")
    if bits is not None and not 0 < bits <= 16:
        raise UserError(f"--bits {bits:g}; allowed: more than 0, at most 16")
    config = checked.config_of(model)
    args.dtype = checked.dtype_of(dtype, config)
    scored = checked.readable_text(text, context + eval, config)
    for file in (json, html):
        checked.writable(file)
    asked = [SERVING[name] for name in dict.fromkeys(engine or SERVING)]
    wish = LossWish(loss or "small", bits)

    from kvlab.trials.recommending import recommended

    def early(advice) -> None:
        """The table, minutes before lines are confirmed."""
        print("\n".join(_opening(advice)), flush=True)

    found = recommended(args, asked, wish, scored, early)
    if json:
        from kvlab.core.records import write_json

        write_json(json, found.data())
    if html:
        from kvlab.advice.page import page
        from kvlab.core.records import write_text

        write_text(html, page(found.data(), shlex.join(["kvlab", *sys.argv[1:]])))
    print("\n".join(_ending(found, wish, device)))


def check_verb(
    model: Annotated[Path, model_folder(argument=True)],
    *,
    format: Annotated[str, word("what the engine's cache stores: fp8_e4m3, q4_0, quanto-int4, ...", metavar="NAME")],
    engine: Annotated[
        str | None, choice("the engine that has it; default: the first that does", tuple(SERVING))
    ] = None,
    device: Device = "cuda",
    skip_layers: Annotated[
        list[int], number("layers that stay in 16 bits, where the engine can leave some", whole(0), metavar="N ...")
    ] = (),
    loss: Annotated[str, choice("how much may be lost; default: small", LOSSES)] = "small",
    text: Annotated[Path | None, path("the text that is predicted; default: docstrings of installed packages")] = None,
    calib_text: Annotated[
        Path | None, path("text that kvlab's own codecs are fitted to; default: docstrings of installed packages")
    ] = None,
    dtype: Dtype = None,
    context: Annotated[int, number("tokens of a window that are coded; default: 128", whole(8))] = 128,
    eval: Annotated[int, number("tokens after them that are predicted; default: 32", whole(2))] = 32,
    windows: Annotated[int, window_count("so many, spread over the text", MOST_CHECKED)] = MOST_CHECKED,
    no_witness: NoWitness = False,
    json: Annotated[Path | None, EVERYTHING] = None,
) -> int:
    """Say whether a model bears a cache format: yes, no or cannot tell; for start scripts.

    The format is measured as its engine reads it. Exit code 0: its loss is surely no more than --loss. 1: surely more.
    2: this many windows cannot tell. Wrong input is exit code 2 too, and a run that cannot be trusted 1: then nothing
    is printed but a line on stderr, where an answer is the first word on stdout, and `answer` in --json.

      kvlab check models/reference --format fp8_e4m3 && vllm serve models/reference --kv-cache-dtype fp8_e4m3
    """
    exact = sorted(set(skip_layers))
    args = SimpleNamespace(**locals(), tokens=None, calib_windows=MOST_CALIB)
    args.windows, args.exactly = most_windows(windows, "--windows")

    from kvlab.cli import checked as inputs

    config = inputs.config_of(model)
    args.dtype = inputs.dtype_of(dtype, config)
    serving, asked = format_named(format, engine)
    if skip_layers and not asked.apart:
        raise UserError(f"--skip-layers: {serving.name} leaves no layers out; leave it out")
    if skip_layers and max(skip_layers) >= config["num_hidden_layers"]:
        raise UserError(f"--skip-layers {max(skip_layers)}; allowed: 0 to {config['num_hidden_layers'] - 1}")
    inputs.refuse_long(context + eval, config)
    if isinstance(asked, OwnFormat) and not (text or calib_text):
        raise UserError(
            f"--format {format} is fitted to docstrings of installed packages, which are what is predicted without"
            " --text; give --text, or --calib-text"
        )
    texts = [inputs.readable_text(text, context + eval, config)] if text else None
    inputs.writable(json)

    from kvlab.calibration.fitting import DOCSTRINGS
    from kvlab.text.excerpts import docstrings
    from kvlab.trials.checking import checked

    args.text = text or DOCSTRINGS
    found = checked(args, serving, asked, texts or docstrings())
    (row,) = found.served
    said = answer(row.found.kl, loss, found.floor.kl.value)
    if json:
        from kvlab.core.records import write_json
        from kvlab.gate.catalogue.rows import ROWS

        told = {"answer": said, "loss": loss, "engine": serving.name} | found.facts | row.data()
        write_json(json, told | {ROWS: list(found.gate_rows)})
    kl = row.found.kl
    limit = bound(loss, found.floor.kl.value)
    interval = f"{100 * kl.confidence:.0f} % {in_digits(kl.low)} to {in_digits(kl.high)}"
    print(
        f"{said}: {row.setting.name} in {serving.name} costs KL {in_digits(kl.value)} nats per token, {interval}, which"
        f" is {_ends(row.verdict.possible)}; {loss} ends at {limit:.2g}. Same top token"
        f" {100 * row.found.top1.value:.1f} %, {row.setting.bits:.2f} bits per value"
    )
    print(_spread(row.found))
    print("\n".join(map(printable, found.about)))
    return {"yes": 0, "no": 1, OPEN: 2}[said]


def format_named(name: str, engine: str | None) -> tuple[ServingEngine, CacheFormat]:
    """The format of this name, of the engine or else the first that has it.

    Raises
    ------
    UnknownName
        None has it.
    """
    engines = [SERVING[engine]] if engine else [*SERVING.values()]
    for one in engines:
        for format in one.formats:
            if format.name == name:
                return one, format
    raise UnknownName("format", name, dict.fromkeys(format.name for one in engines for format in one.formats))


def _opening(advice) -> Iterator[str]:
    """Every format over a finished cache (`advised.Advice`), for people."""
    facts = advice.facts
    memory = f"MiB of {facts['tokens']} tokens"
    yield from map(printable, advice.about)
    yield ""
    floor = {"format": "rounding to bfloat16", "engines": None, "bits": "16", "verdict": None}
    rows = [floor | _figures(advice.floor) | {memory: f"{2 * sum(facts['values']) / MIB:.4g}"}]
    rows += [_row(row) | {memory: f"{row.bytes / MIB:.4g}"} for row in advice.finished]
    yield as_text(rows, (*COLUMNS, memory, "verdict"), "table")
    limits = ", ".join(f"{name} below {bound(name, advice.floor.kl.value):.2g}" for name in LOSSES)
    yield ""
    yield "KL in nats per token, over a finished cache; bits per value with scales; the first row is the noise floor"
    yield f"verdicts: {limits}, broken above; cannot tell where the interval lies in several"


def _ending(advice, wish, device: str) -> Iterator[str]:
    """Candidates as their engines read them, and the lines to paste."""
    yield ""
    if advice.served:
        yield "as their engine reads them: with all but transformers a prompt's own tokens read coded K and V too"
        yield as_text([_row(row) for row in advice.served], (*COLUMNS, "verdict"), "table")
    yield ""
    yield f"to paste where the engine runs on {device} (--device):"
    for line in advice.lines:
        yield ""
        yield from map(printable, _advised(line, advice.facts, advice.floor.kl.value, wish))


def _row(row) -> dict:
    named = {"format": row.setting.name, "engines": ", ".join(row.engines), "bits": f"{row.setting.bits:.2f}"}
    return named | _figures(row.found) | {"verdict": row.verdict.told}


def _advised(line, facts: dict, floor: float, wish) -> Iterator[str]:
    """What to type for an engine, what it costs, and what that was not measured on."""
    engine, setting = line.engine, line.setting
    asked = f"{wish.loss} loss" if wish.bits is None else f"{wish.bits:g} bits per value"
    if setting is None:
        near = f"; the nearest is {line.nearest.name}" if line.nearest else ""
        yield f"{engine.name}: none of its formats is surely of {asked}{near}. Leave the cache in 16 bits:"
        yield f"  {line.paste(facts)}"
        return
    kl, top = line.confirmed.kl, line.confirmed.top1
    yield (
        f"{engine.name}: {setting.name}, {setting.bits:.2f} bits per value. Its loss on text that chose nothing is"
        f" {_ends(verdict(kl, floor).possible)}{_doubt(line)}: KL {in_digits(kl.value)}, 95 % {in_digits(kl.low)} to"
        f" {in_digits(kl.high)}, same top token {100 * top.value:.1f} %"
    )
    yield f"  {_spread(line.confirmed)}"
    yield f"  {line.paste(facts)}"
    if setting.format.needs:
        yield f"  needs {setting.format.needs}"
    if line.tables:
        yield f"  beside it {line.tables / MIB:.3g} MiB of tables, once a process"
    yield (
        f"  measured with transformers in {facts['dtype']} on {facts['device']}, contexts of {facts['context']} tokens;"
        f" the format is held against {line.held}"
    )
    yield f"  not measured: {line.unmeasured}; longer contexts, other text, tasks, speed"


def _spread(found) -> str:
    """How a loss lies over tokens: its largest parts, and by how sure the model was of its next token."""
    large = ", ".join(f"{name} of tokens below {in_digits(kl)}" for name, kl in found.quantiles.items() if "%" in name)
    sure = ", ".join(f"{name}: {in_digits(kl)}" for name, kl in found.by_confidence.items())
    return f"{large}; KL by the model's own highest probability, {sure}"


def _doubt(line) -> str:
    """Where the text that chose nothing does not say what was asked for."""
    return {"yes": "", "no": ", NOT what was asked for: do not take it", OPEN: ", not surely what was asked for"}[
        line.holds
    ]


def _ends(possible: tuple[str, ...]) -> str:
    """The classes that a loss may be of, the first and the last."""
    return " to ".join(dict.fromkeys((possible[0], possible[-1])))


def _figures(found) -> dict:
    return {
        "KL": in_digits(found.kl.value),
        "95 %": f"{in_digits(found.kl.low)} to {in_digits(found.kl.high)}",
        "same top token": f"{100 * found.top1.value:.1f} %",
    } | {name: in_digits(value) for name, value in found.quantiles.items()}
