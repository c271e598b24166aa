"""What `kvlab measure` runs once its inputs are checked: calibration, scores, estimates. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import torch

from kvlab.attention.named import Latent, Mechanism
from kvlab.cache.files.calibration import load_calibration
from kvlab.cache.hf.codec_tables import resident_bytes
from kvlab.calibration.biases import of_biases
from kvlab.calibration.fitting import CalibrationText
from kvlab.calibration.load import Calibrated
from kvlab.calibration.needs import needs_calibration, reads, reads_weights_alone
from kvlab.cli import costs
from kvlab.cli.checked import Named, info_of
from kvlab.cli.costs import CostRow
from kvlab.cli.flags import most_windows
from kvlab.core.model import ModelInfo, load_tokenizer
from kvlab.core.origin import told_of
from kvlab.core.records import sha256, versions
from kvlab.engines.base import Engine
from kvlab.engines.registry import start
from kvlab.measure import quick_run
from kvlab.measure.latent import moments_of
from kvlab.measure.mechanism import mechanism_variant, not_run
from kvlab.measure.places import places
from kvlab.measure.variant import Variant, read_of
from kvlab.output.terminal import all_there_are
from kvlab.stats.bootstrap import Estimate
from kvlab.stats.kl_scale import span_in_words
from kvlab.text.excerpts import refuse_overlap, windows_of
from kvlab.witness.plain import PlainModel


@dataclass(frozen=True)
class CodecDifference:
    """One codec minus another at the same bits, paired by token."""

    codec: str
    against: str
    bits: float | None
    kl: Estimate
    top1: Estimate


@dataclass(frozen=True)
class Measurement:
    """Everything that was measured.

    Parameters
    ----------
    facts : dict
        Of what, on what, with what.
    about : tuple of str
        The same in lines for people.
    """

    facts: dict
    about: tuple[str, ...]
    rows: tuple[CostRow, ...]
    differences: tuple[CodecDifference, ...]
    mechanisms: bool = False

    def data(self) -> dict:
        """For programs."""
        rows = [vars(row) | {"kl": row.kl.to_json(), "top1": row.top1.to_json()} for row in self.rows]
        pairs = [vars(pair) | {"kl": pair.kl.to_json(), "top1": pair.top1.to_json()} for pair in self.differences]
        return self.facts | {"rows": rows, "differences": pairs, "pick": self.pick}

    @property
    def pick(self) -> dict:
        """Which row to take; see `costs.pick`."""
        return costs.pick(self.rows)


def measured(
    args: SimpleNamespace,
    named: Sequence[Named],
    text: str,
    calib_text: str | None,
    mechanisms: Sequence[Mechanism] = (),
) -> Measurement:
    """Cut the text, fit what is missing, measure every codec.

    Parameters
    ----------
    args : SimpleNamespace
        What `kvlab measure` was asked for, by the names of its parameters.
    named : sequence of Named
        The codecs.
    text, calib_text : str
        What is scored, and what --calib-text holds.
    mechanisms : sequence of Mechanism
        What reads less of the cache, or stores it as latents.

    Raises
    ------
    CorpusError
        The text is too short, or was calibrated on.
    CalibrationMismatch
        --calibration is of another model.
    """
    info = info_of(args.model)
    length = args.context + args.eval
    most, exactly = most_windows(args.windows, "--windows")
    windows = windows_of([text], load_tokenizer(info), length, most, str(args.text), args.context, exactly)
    stored = load_calibration(args.calibration, info) if args.calibration else None
    engine = start(args.engine, info, args.dtype, max_tokens=length)
    try:
        calibrated, lines = _calibrated(args, named, stored, engine, windows, calib_text, mechanisms)
        codecs = [quick_run.rounding(args.dtype, args.protocol)]
        codecs += [
            quick_run.NamedCodec(one.label, one.recipe, calibrated.get(one.label), args.protocol) for one in named
        ]
        plain = None if args.no_witness else cache(partial(PlainModel, info.path))
        variants, untried = _variants(args, mechanisms, engine, windows, calib_text, lines)
        scored = quick_run.score(engine, windows, args.context, codecs, plain, variants)
        coded, others = scored[: len(codecs)], scored[len(codecs) :]
        device = engine.device
    finally:
        engine.close()
    rows = _rows(named, coded, calibrated, info, (args.context, length))
    rows += tuple(_row((one.variant.name, None, None), one, rows[0].kl.value) for one in others)
    count, short = len(windows), all_there_are(len(windows), most)
    disclosure = told_of(info.path)
    about = (
        f"{args.model}: {info.n_layers} layers, {info.n_kv_heads} KV heads of {info.head_dim} dimensions;"
        f" {args.engine}, {args.dtype}, {args.protocol}",
        *([disclosure] if disclosure else []),
        f"{count} windows of {args.context} coded and {args.eval} predicted tokens of {args.text}{short}",
        *lines,
        "one window of each codec was computed a second time, by other code, and agrees"
        if any(one.witnessed for one in coded)
        else "nothing was computed a second time, as --no-witness asks",
        *map(_vouched, others),
        *(f"{name}: not_run, {why}" for name, why in untried.items()),
    )
    facts = {
        "model": str(args.model),
        "model_hash": info.model_hash,
        "disclosure": disclosure,
        "engine": args.engine,
        "dtype": args.dtype,
        "protocol": args.protocol,
        "text": str(args.text),
        "text_hash": sha256(windows.tobytes()),
        "windows": count,
        "windows_wanted": int(most),
        "context": args.context,
        "eval": args.eval,
        "calibration": list(lines),
        "witnessed": [one.witnessed.model_dump(mode="json") for one in coded if one.witnessed],
        "not_run": untried,
        "mechanisms_witnessed": {one.variant.name: one.witnessed for one in others},
        "device": device,
        "threads": torch.get_num_threads(),
        "speed": "tokens of a context stored and read back per second: coded, packed, unpacked, decoded, all layers",
        "versions": versions(),
    }
    return Measurement(facts, about, rows, _differences(args.against, named, coded), bool(mechanisms))


def _vouched(one: quick_run.Scored) -> str:
    """What speaks for a mechanism's row, in a line."""
    seen = "not computed a second time" if one.witnessed is None else "one window computed a second time agrees"
    return f"{one.variant.name}: ran in every layer, left something out, moves the logits; {seen}"


def _calibrated(
    args: SimpleNamespace,
    named: Sequence[Named],
    stored: Calibrated | None,
    engine: Engine,
    windows: np.ndarray,
    calib_text: str | None,
    mechanisms: Sequence[Mechanism],
) -> tuple[dict[str, Calibrated], list[str]]:
    """What each codec that is calibrated reads, by label, and where it is from: a file, or fitted now."""
    needy = [one for one in named if any(needs_calibration(getattr(one.recipe, stream)) for stream in ("k", "v"))]
    found = {one.label: stored for one in needy if stored and covers(stored, one.recipe)}
    lines = []
    if found:
        lines.append(f"calibration {args.calibration} for {', '.join(found)}; it must not have seen this text")
    elif stored:
        why = "it does not hold what these codecs read" if needy else "none of these codecs is calibrated"
        lines.append(f"calibration {args.calibration} is not read: {why}")
    missing = [one for one in needy if one.label not in found]
    known = [one for one in missing if reads_weights_alone(one.recipe)]
    if known:
        from_weights = of_biases(engine.info, args.context, engine.name)
        found |= {one.label: from_weights for one in known}
        lines.append(f"means of {', '.join(one.label for one in known)}: the model's biases, no text was read for them")
    missing = [one for one in missing if one not in known]
    if missing:
        source = _calibration_text(args, engine, calib_text)
        refuse_overlap(windows, source.windows, (str(args.text), source.name))
        fresh = source.fit(engine, [one.recipe for one in missing])
        found |= {one.label: fresh for one in missing}
        lines.append(source.about(engine))
    elif args.calib_text and not any(isinstance(one, Latent) for one in mechanisms):
        lines.append(f"--calib-text {args.calib_text} is not read: nothing had to be fitted")
    return found, lines


def _calibration_text(args: SimpleNamespace, engine: Engine, calib_text: str | None) -> CalibrationText:
    """The windows that --calib-text and --calib-windows ask for."""
    wanted_windows = most_windows(args.calib_windows, "--calib-windows")
    return CalibrationText.read(engine.info, args.calib_text, calib_text, args.context, *wanted_windows)


def covers(stored: Calibrated, recipe) -> bool:
    """Whether a calibration holds all that a recipe reads."""
    for stream in ("k", "v"):
        due = reads(getattr(recipe, stream), stream)
        if "whitener" in due and not stored.metric(recipe.placement):
            return False
        if "own" in due and not stored.own.get((stream, getattr(recipe, stream).codec)):
            return False
        if "archive" in due and stored.archive is None:
            return False
        if "whole" in due and not any(one.read_by(recipe) for one in stored.whole.values()):
            return False  # predictors belong to their bits
        if "bias" in due and not stored.biases.get((stream, recipe.placement if stream == "k" else "pre_rope")):
            return False
        if "outputs" in due and not stored.outputs:
            return False
        if "components" in due and not stored.components.get(stream):
            return False
        if "table" in due:
            return False  # a table belongs to one recipe and its bits
    return True


def _rows(
    named: Sequence[Named],
    scored: Sequence[quick_run.Scored],
    calibrated: dict[str, Calibrated],
    info: ModelInfo,
    lengths: tuple[int, int],
) -> tuple[CostRow, ...]:
    """Of codecs; `lengths` are tokens of a context and of a window."""
    floor, *others = scored
    values = info.values_per_token
    rounding = floor.estimates()
    words = "what storing K and V in 16 bits costs"
    first = 2.0 * values
    rows = [CostRow(quick_run.ROUNDING, None, None, 16.0, *rounding, words, first, read_of(first, *lengths, info))]
    for one, found in zip(named, others, strict=True):
        fitted = calibrated.get(one.label)
        row = replace(
            _row((one.codec, one.bits, one.recipe.recipe_id), found, rounding[0].value),
            table_bytes=resident_bytes(one.recipe, fitted, info) if fitted else 0,
            tokens_per_second=costs.tokens_per_second(lengths[found.variant.cell.span == "window"], found.seconds),
            places=places(one.recipe, fitted, info),
        )
        rows.append(replace(row, pays_from=costs.pays_from(row, values)))
    return tuple(rows)


def _row(names: tuple, found: quick_run.Scored, floor: float) -> CostRow:
    """A row with its first three columns given; `floor` is the KL of rounding, by which it is put into words."""
    kl, top1 = found.estimates()
    cost, words = found.cost, span_in_words(kl.low, kl.high, floor)
    return CostRow(*names, cost.bits_per_value, kl, top1, words, cost.stored, cost.read)


def _variants(
    args: SimpleNamespace,
    mechanisms: Sequence[Mechanism],
    engine: Engine,
    windows: np.ndarray,
    calib_text: str | None,
    lines: list[str],
) -> tuple[list[Variant], dict[str, str]]:
    """The mechanisms that can be measured, latents fitted, and why the others cannot."""
    untried = {one.name: why for one in mechanisms if (why := not_run(one, args.engine, args.protocol, engine.info))}
    able, moments = [one for one in mechanisms if one.name not in untried], {}
    if any(isinstance(one, Latent) for one in able):
        source = _calibration_text(args, engine, calib_text)
        refuse_overlap(windows, source.windows, (str(args.text), source.name))
        moments = moments_of(engine, source.windows.tolist())
        lines.append(f"latents {source.about(engine)}")
    return [mechanism_variant(one, engine, args.protocol, moments) for one in able], untried


def _differences(
    against: str | None, named: Sequence[Named], scored: Sequence[quick_run.Scored]
) -> tuple[CodecDifference, ...]:
    """Every codec minus that of --against, at the same bits or where one of both has no choice."""
    found = list(zip(named, scored[1:], strict=True))
    others = [pair for pair in found if pair[0].codec == against]
    pairs = []
    for (one, ours), (other, theirs) in product([pair for pair in found if pair[0].codec != against], others):
        if one.bits == other.bits or None in (one.bits, other.bits):
            kl, top1 = (quick_run.BOOTSTRAP.difference(a, b) for a, b in zip(ours.columns, theirs.columns, strict=True))
            bits = one.bits if other.bits is None else other.bits
            pairs.append(CodecDifference(one.codec, other.codec, bits, kl, top1))
    return tuple(pairs)
