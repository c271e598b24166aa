"""`kvlab measure`: what codecs cost a model on a text, without params.yaml. Heavy imports happen inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from kvlab.cli.flags import (
    EVERYTHING,
    Dtype,
    Engine,
    Most,
    choice,
    model_folder,
    number,
    path,
    switch,
    whole,
    window_count,
    word,
)
from kvlab.core.errors import CapabilityError, UserError
from kvlab.core.recipe import WHOLE
from kvlab.output.terminal import as_text, printable

COLUMNS = (
    "codec",
    "bits",
    "bits/value",
    "KL",
    "95 %",
    "same top token",
    "how large",
    "MiB",
    "tables",
    "codec tok/s",
    "runs in",
)
READING = ("stored B/token", "read KiB")
PAIRED = ("difference", "bits", "KL", "95 %", "same top token", "costs less")
MIB = 2**20
SMALL = 1e-3  # below, numbers are written with two digits instead of four decimals
MOST, MOST_CALIB = Most(8), Most(32)


def measure_verb(
    model: Annotated[Path, model_folder(argument=True)],
    *,
    codec: Annotated[
        list[str], word("klt, kivi, hadamard+center, ...; several may be named; default: klt", metavar="CODEC ...")
    ] = ("klt",),
    bits: Annotated[list[float], number("bits of K and of V, each measured; default: 4", float, metavar="N ...")] = (),
    mechanism: Annotated[
        list[str],
        word(
            "block_sparse, chunk_summary, window, by_length, latent:rank=128, sinks:percent=25: docs/mechanisms.md",
            metavar="NAME ...",
        ),
    ] = (),
    text: Annotated[Path, path("the text that is predicted, UTF-8")],
    against: Annotated[
        str | None, word("another codec at the same bits, and the paired differences from it", metavar="CODEC")
    ] = None,
    engine: Engine = "hf",
    dtype: Dtype = None,
    protocol: Annotated[
        str,
        choice(
            "snapshot codes a finished cache, in_forward while it is computed; default: snapshot",
            ("snapshot", "in_forward"),
        ),
    ] = "snapshot",
    context: Annotated[int, number("tokens of a window that are coded; default: 512", whole(8))] = 512,
    eval: Annotated[int, number("tokens after them that are predicted; default: 128", whole(2))] = 128,
    windows: Annotated[int, window_count("so many, spread over the text", MOST)] = MOST,
    calibration: Annotated[Path | None, path("what `kvlab calibrate` wrote")] = None,
    calib_text: Annotated[Path | None, path("text to calibrate on; default: docstrings of installed packages")] = None,
    calib_windows: Annotated[int, window_count("of it, as long as a context", MOST_CALIB)] = MOST_CALIB,
    no_witness: Annotated[
        bool, switch("compute nothing a second time: spares its time, and up to 1 GiB of memory", "--no-witness")
    ] = False,
    json: Annotated[Path | None, EVERYTHING] = None,
) -> None:
    """Measure what codecs cost a model on a text of yours, and say which one to take.

    The text is cut into windows. The KV cache of each window's context is coded, the tokens after it are predicted
    with it, and held against what the model predicts with its own cache. Bits per value are those of a stored cache,
    everything counted; intervals are of a bootstrap over windows. Memory, speed and the places where a codec can run
    stand beside them. The pick is the row of the fewest bits of those that a model can run with and whose KL is small.
    Nothing is written but --json. One window of each codec is computed a second time, by a forward in float32 that is
    written out; a disagreement ends the command.

    Codecs that are calibrated read --calibration; what that does not hold is fitted first, to --calib-text or else to
    docstrings of installed packages, never to the scored text. What reads less of the cache, or keeps latents of it, is
    measured beside codecs with --mechanism; then bytes that a token stores and reads are told too.

      kvlab measure models/reference --codec klt --bits 2 3 --text notes.txt --against kivi
    """
    args = SimpleNamespace(**locals())  # what was asked for, for what measures it

    from kvlab.attention import named as mechanisms_named
    from kvlab.cli import checked

    config = checked.config_of(model)
    args.dtype = checked.dtype_of(dtype, config)
    checked.refuse_absent(engine)
    named = _named(codec, against, bits, protocol)
    scored = checked.readable_text(text, context + eval, config)
    if calib_text and calib_text.samefile(text):
        raise UserError(f"--calib-text is the scored text, {text}: what is scored must not have been calibrated on")
    fitted_to = checked.readable_text(calib_text, context, config) if calib_text else None
    checked.calibration_file(calibration)
    checked.writable(json)
    mechanisms = [mechanisms_named.mechanism(name) for name in dict.fromkeys(mechanism)]

    from kvlab.cli.measuring import measured

    found = measured(args, named, scored, fitted_to, mechanisms)
    if json:
        from kvlab.core.records import write_json

        write_json(json, found.data())
    print("\n".join(as_lines(found)))


def _named(codecs: Sequence[str], against: str | None, bits: Sequence[float], protocol: str) -> list:
    """Every codec at every width (`checked.Named`), each once; that of --against last."""
    from kvlab.cli.checked import all_recipes_of

    if against in codecs:
        raise UserError(f"--against {against} is measured already; name another codec than those of --codec")
    named = all_recipes_of([*codecs, *([against] if against else [])], bits)
    if protocol == "in_forward" and (whole := [one.codec for one in named if one.recipe.k.codec in WHOLE]):
        raise CapabilityError(
            f"codec {whole[0]!r} codes whole caches, which a forward does not have before its end; leave --protocol out"
        )
    return named


def as_lines(found) -> Iterator[str]:
    """What was found (`measuring.Measurement`), for people."""
    context = found.facts["context"]
    yield from map(printable, found.about)
    yield ""
    rows = [_row(row, context) for row in found.rows]
    yield as_text(rows, COLUMNS + (READING if found.mechanisms else ()), "table")
    if found.differences:
        yield ""
        yield as_text(list(map(_pair, found.differences)), PAIRED, "table")
    yield ""
    yield "KL in nats per token; how large it is, beside quantised weights: docs/measure.md"
    yield (
        f"MiB of {context} tokens; tables: MiB that codecs hold in memory, once a process; codec tok/s: tokens"
        f" stored and read back by the codec alone, on {found.facts['device']}, threads: {found.facts['threads']}"
    )
    if found.facts["protocol"] == "snapshot":
        yield (
            "warning: a cache that is coded while it is computed, layer by layer, costs more than this finished one;"
            " --protocol in_forward measures it"
        )
    yield printable(_picked(found))


def _picked(found) -> str:
    """Which row to take, in a line."""
    pick, rows = found.pick, found.rows
    taken, stored, nearest = (None if pick[key] is None else rows[pick[key]] for key in ("taken", "stored", "nearest"))
    if taken:
        line = (
            f"{_name(taken)}, the fewest bits ({taken.bits_per_value:.2f}) of those that a model can run with and whose"
            f" KL is surely small (95 % up to {in_digits(taken.kl.high)}, below {pick['below']:.2g})"
        )
        if taken.table_bytes and taken.pays_from:
            line += f"; with its tables it is smaller than bfloat16 from {taken.pays_from} tokens on"
    elif nearest:
        line = (
            f"none, as no row that a model can run with has a KL that is surely small (95 % below {pick['below']:.2g});"
            f" the nearest is {_name(nearest)}, up to {in_digits(nearest.kl.high)}: give more --bits, or more windows"
        )
    else:
        line = "none, as a model can run with none of these rows"
    kept = f"; for a cache that is put away {_name(stored)} ({stored.bits_per_value:.2f})" if stored else ""
    over = ", over a finished cache" if found.facts["protocol"] == "snapshot" else ""
    return f"pick{over}: {line}{kept}"


def _name(row) -> str:
    """Codec and bits."""
    return f"{row.codec} {_bits(row.bits)}".strip()


def _row(row, context: int) -> dict:
    return {
        "codec": row.codec,
        "bits": _bits(row.bits),
        "bits/value": f"{row.bits_per_value:.2f}",
        "KL": in_digits(row.kl.value),
        "95 %": f"{in_digits(row.kl.low)} to {in_digits(row.kl.high)}",
        "same top token": f"{100 * row.top1.value:.1f} %",
        "how large": row.words,
        "MiB": f"{row.stored * context / MIB:.3g}",
        "tables": None if row.table_bytes is None else f"{row.table_bytes / MIB:.3g}",
        "codec tok/s": None if row.tokens_per_second is None else f"{float(f'{row.tokens_per_second:.3g}'):g}",
        "runs in": _places(row.places),
        "stored B/token": f"{row.stored:.0f}",
        "read KiB": f"{row.read / 1024:.0f}",
    }


def _pair(pair) -> dict:
    better = pair.codec if pair.kl.value < 0 else pair.against
    return {
        "difference": f"{pair.codec} - {pair.against}",
        "bits": _bits(pair.bits),
        "KL": in_digits(pair.kl.value, "+"),
        "95 %": f"{in_digits(pair.kl.low, '+')} to {in_digits(pair.kl.high, '+')}",
        "same top token": f"{100 * pair.top1.value:+.1f} points",
        "costs less": "not told apart" if pair.kl.low <= 0 <= pair.kl.high else better,
    }


def _places(places: tuple[str, ...] | None) -> str | None:
    """Where a model can run with a row; None of what is no codec."""
    if places is None:
        return None
    served = [place for place in places if place != "store"]
    return ", ".join(served) or ("store only" if places else "nowhere yet")


def _bits(bits: float | None) -> str:
    return "" if bits is None else f"{bits:g}"


def in_digits(value: float, sign: str = "") -> str:
    """A KL for people: four decimals, or two digits and an exponent where it is smaller."""
    return f"{value:{sign}.4f}" if value == 0 or abs(value) >= SMALL else f"{value:{sign}.1e}"
