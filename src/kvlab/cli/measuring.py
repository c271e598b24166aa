"""What `kvlab measure` runs once its inputs are checked: calibration, scores, estimates. Imports torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import numpy as np

from kvlab.base.model import load_tokenizer
from kvlab.base.records import sha256, versions
from kvlab.cache.calibration_file import load_calibration
from kvlab.calibration.load import Calibrated
from kvlab.calibration.needs import needs_calibration, reads
from kvlab.cli.checked import Named, info_of
from kvlab.cli.fitting import CalibrationText
from kvlab.engines.base import Engine
from kvlab.engines.registry import start
from kvlab.lab import trial
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.kl_scale import span_in_words
from kvlab.text.excerpts import refuse_overlap, windows_of
from kvlab.witness.plain import PlainModel

BOOTSTRAP = Bootstrap(resamples=2000, confidence=0.95, seed=0)  # as in params.yaml


@dataclass(frozen=True)
class Row:
    """What one codec costs.

    Parameters
    ----------
    codec, bits
        As asked for; None where it has no choice of bits.
    recipe_id : str or None
        None for what is no codec.
    bits_per_value : float
        Of the stored cache of a context, everything counted.
    kl, top1 : Estimate
        Nats per token, and the share of tokens whose most probable successor stays the same.
    words : str
        How large `kl` is, by its interval.
    """

    codec: str
    bits: float | None
    recipe_id: str | None
    bits_per_value: float
    kl: Estimate
    top1: Estimate
    words: str


@dataclass(frozen=True)
class Difference:
    """One codec minus another at the same bits, paired by token."""

    codec: str
    against: str
    bits: float | None
    kl: Estimate
    top1: Estimate


@dataclass(frozen=True)
class Found:
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
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]

    def data(self) -> dict:
        """For programs."""
        rows = [vars(row) | {"kl": row.kl.to_json(), "top1": row.top1.to_json()} for row in self.rows]
        pairs = [vars(pair) | {"kl": pair.kl.to_json(), "top1": pair.top1.to_json()} for pair in self.differences]
        return self.facts | {"rows": rows, "differences": pairs}


def measured(args: argparse.Namespace, named: Sequence[Named], text: str, calib_text: str | None) -> Found:
    """Cut the text, fit what is missing, measure every codec.

    Parameters
    ----------
    args : argparse.Namespace
        Of `kvlab measure`.
    named : sequence of Named
        The codecs.
    text, calib_text : str
        What is scored, and what --calib-text holds.

    Raises
    ------
    CorpusError
        The text is too short, or was calibrated on.
    CalibrationMismatch
        --calibration is of another model.
    """
    info = info_of(args.model)
    length = args.context + args.eval
    windows = windows_of([text], load_tokenizer(info), length, args.windows, str(args.text))
    stored = load_calibration(args.calibration, info) if args.calibration else None
    engine = start(args.engine, info, args.dtype, max_tokens=length)
    try:
        calibrated, lines = _calibrated(args, named, stored, engine, windows, calib_text)
        subjects = [trial.rounding(args.dtype)]
        subjects += [trial.Subject(one.label, one.recipe, calibrated.get(one.label)) for one in named]
        plain = None if args.no_witness else cache(partial(PlainModel, info.path))
        scored = trial.score(engine, windows, args.context, subjects, args.protocol, plain)
        device = engine.device
    finally:
        engine.close()
    rows = _rows(named, scored)
    count = len(windows)
    about = (
        f"{args.model}: {info.n_layers} layers, {info.n_kv_heads} KV heads of {info.head_dim} dimensions;"
        f" {args.engine}, {args.dtype}, {args.protocol}",
        f"{count} windows of {args.context} coded and {args.eval} predicted tokens of {args.text}",
        *lines,
        "one window of each codec was computed a second time, by other code, and agrees"
        if any(one.witnessed for one in scored)
        else "nothing was computed a second time, as --no-witness asks",
    )
    facts = {
        "model": str(args.model),
        "model_hash": info.model_hash,
        "engine": args.engine,
        "dtype": args.dtype,
        "protocol": args.protocol,
        "text": str(args.text),
        "text_hash": sha256(windows.tobytes()),
        "windows": count,
        "context": args.context,
        "eval": args.eval,
        "calibration": list(lines),
        "witnessed": [one.witnessed.model_dump(mode="json") for one in scored if one.witnessed],
        "device": device,
        "versions": versions(),
    }
    return Found(facts, about, rows, _differences(args.against, named, scored))


def _calibrated(
    args: argparse.Namespace,
    named: Sequence[Named],
    stored: Calibrated | None,
    engine: Engine,
    windows: np.ndarray,
    calib_text: str | None,
) -> tuple[dict[str, Calibrated], list[str]]:
    """What each codec that is calibrated reads, by label, and where it is from: a file, or fitted now."""
    needy = [one for one in named if any(needs_calibration(getattr(one.recipe, stream)) for stream in ("k", "v"))]
    found = {one.label: stored for one in needy if stored and covers(stored, one.recipe)}
    lines = []
    if found:
        lines.append(f"calibration {args.calibration} for {', '.join(found)}; which must not have seen the text")
    missing = [one for one in needy if one.label not in found]
    if missing:
        source = CalibrationText.read(engine.info, args.calib_text, calib_text, args.context, args.calib_windows)
        refuse_overlap(windows, source.windows, (str(args.text), source.name))
        fresh = source.fit(engine, [one.recipe for one in missing])
        found |= {one.label: fresh for one in missing}
        lines.append(source.about(engine))
    elif stored and not found:
        lines.append(f"calibration {args.calibration} is not read: none of these codecs is calibrated")
    return found, lines


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
        if "outputs" in due and not stored.outputs:
            return False
        if "components" in due and not stored.components.get(stream):
            return False
        if "table" in due:
            return False  # a table belongs to one recipe and its bits
    return True


def _rows(named: Sequence[Named], scored: Sequence[trial.Scored]) -> tuple[Row, ...]:
    floor, *others = scored
    rounding = _estimates(floor)
    words = "what storing K and V in 16 bits costs"
    rows = [Row(trial.ROUNDING, None, None, 16.0, *rounding, words)]
    for one, found in zip(named, others, strict=True):
        kl, top1 = _estimates(found)
        words = span_in_words(kl.low, kl.high, rounding[0].value)
        rows.append(Row(one.codec, one.bits, one.recipe.recipe_id, found.coding.bits_per_value, kl, top1, words))
    return tuple(rows)


def _differences(against: str | None, named: Sequence[Named], scored: Sequence[trial.Scored]) -> tuple[Difference, ...]:
    """Every codec minus that of --against, at the same bits or where one of both has no choice."""
    found = list(zip(named, scored[1:], strict=True))
    others = [pair for pair in found if pair[0].codec == against]
    pairs = []
    for (one, ours), (other, theirs) in product([pair for pair in found if pair[0].codec != against], others):
        if one.bits == other.bits or None in (one.bits, other.bits):
            kl, top1 = (BOOTSTRAP.difference(a, b) for a, b in zip(_columns(ours), _columns(theirs), strict=True))
            bits = one.bits if other.bits is None else other.bits
            pairs.append(Difference(one.codec, other.codec, bits, kl, top1))
    return tuple(pairs)


def _estimates(scored: trial.Scored) -> tuple[Estimate, Estimate]:
    """Of the KL divergence and of the top-1 agreement."""
    kl, top1 = _columns(scored)
    return BOOTSTRAP.mean(kl).within(0.0, float("inf")), BOOTSTRAP.rate(top1)


def _columns(scored: trial.Scored) -> tuple[Column, Column]:
    tokens = scored.tokens
    where = tokens["window"].to_numpy(), tokens["position"].to_numpy()
    same = (tokens["top1_ref"] == tokens["top1_alt"]).to_numpy()
    return Column.of(*where, tokens["kl"].to_numpy()), Column.of(*where, same)
