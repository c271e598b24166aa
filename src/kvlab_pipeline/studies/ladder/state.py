"""Bits of a whole cache at so many tokens, calibration and exact tokens counted, and the model's coding gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlab.codecs.shared.exact_tokens import ExactTokens
from kvlab.core.errors import MissingResult, MixedIdentity
from kvlab.core.params import Params
from kvlab.core.recipe import Recipe
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab_pipeline.studies.ladder.numbers import FEWEST, Rung
from kvlab_pipeline.studies.ladder.record import Facts, Further, calibrated_rungs, gain_windows
from kvlab_pipeline.studies.measured import Results

LENGTHS = (1024, 8192, 32768, 131072)  # tokens of a cache
EXACT_BITS = 16  # of a value that is kept as it is


@dataclass(frozen=True)
class State:
    """How a rung's bits grow with the tokens of a cache: linear, once the exact tokens are there.

    Parameters
    ----------
    rate : float
        Bits per value of a coded token.
    exact : float
        Tokens that are kept as they are, in 16 bits.
    artefact : float
        Bits of what its codecs hold in memory of a calibration, per value of a token.
    """

    rate: float
    exact: float
    artefact: float

    def bits(self, tokens: float) -> float:
        """Bits per value of a cache of so many tokens."""
        exact = min(tokens, self.exact)
        return (self.rate * (tokens - exact) + EXACT_BITS * exact + self.artefact) / tokens

    def even(self, other: State) -> float | None:
        """Tokens from which on this one stores no more than another; 0 for always, None for never.

        Beyond both exact parts: where the lines ``rate * N + (16 - rate) * exact + artefact`` meet.
        """
        head = (EXACT_BITS - self.rate) * self.exact + self.artefact
        theirs = (EXACT_BITS - other.rate) * other.exact + other.artefact
        if self.rate >= other.rate:  # beyond some length more, unless the rates are equal
            return 0.0 if self.rate == other.rate and head <= theirs else None
        return max(0.0, (head - theirs) / (other.rate - self.rate))


PLAIN = State(rate=EXACT_BITS, exact=0.0, artefact=0.0)


def state_of(one: Rung, facts: Facts) -> State:
    """A rung's state, its exact tokens being those that its recipe keeps and those after the coded context.

    Under `snapshot` the tokens after the context are as the engine made them: at the mean scored token, half of them.
    """
    recipe, recipe_id = one.measured.cell.recipe, one.measured.record.recipe_id
    context = one.measured.context
    kept = kept_tokens(recipe, context)
    bits = one.bits * context - EXACT_BITS * min(kept, context)
    rate = bits / (context - kept) if kept < context else float(EXACT_BITS)
    weights = {found.recipe_id: found.resident_bytes for found in facts.artefacts}
    artefact = 8 * weights.get(recipe_id, 0) / facts.values_per_token
    return State(rate, kept + one.measured.eval / 2, artefact)


def kept_tokens(recipe: Recipe, tokens: int) -> float:
    """How many of so many tokens a recipe keeps as they are, the mean of K and V."""
    return sum(tokens - ExactTokens.of(stream).split(tokens)[1] for stream in (recipe.k, recipe.v)) / 2


def state_entries(params: Params, facts: Facts, rungs: Sequence[Rung]) -> list[dict]:
    """The part ``ladder_state``: one entry for each rung over the coded clean cache.

    A calibrated rung is set beside the calibration-free one that costs no more KL and stores least, on the text of
    another domain where there is one.
    """
    due, given = {one.recipe_id for one in calibrated_rungs(params)}, {one.recipe_id for one in facts.artefacts}
    if due != given:
        raise MissingResult(
            f"the ladder's facts weigh {len(given)} calibrations where {len(due)} are planned; run `kvlab step ladder`",
            code="missing-result.other-calibrations",
        )
    plain = [one for one in rungs if one.plain]
    text = "other" if any(one.text == "other" for one in plain) else "test"
    mine = [one for one in plain if one.text == text]
    return [state_entry(one, [other for other in mine if other is not one], facts) for one in mine]


def state_entry(one: Rung, others: Sequence[Rung], facts: Facts) -> dict:
    """One rung."""
    own, recipe_id = state_of(one, facts), one.measured.record.recipe_id
    weights = {found.recipe_id: found for found in facts.artefacts}
    kl = one.column("kl").means.mean()
    able = [
        (state_of(other, facts), other)
        for other in others
        if other.measured.record.recipe_id not in weights and other.column("kl").means.mean() <= kl
    ]
    best, rung = min(able, key=lambda pair: pair[0].rate, default=(None, None)) if own.artefact else (None, None)
    return {
        "label": one.label,
        "recipe_id": recipe_id,
        "text": one.text,
        "rate": own.rate,
        "exact_tokens": own.exact,
        "whole_bytes": weights[recipe_id].whole_bytes if own.artefact else 0,
        "decoder_bytes": weights[recipe_id].decoder_bytes if own.artefact else 0,
        "resident_bytes": weights[recipe_id].resident_bytes if own.artefact else 0,
        "at": [{"tokens": tokens, "bits_per_value": own.bits(tokens)} for tokens in LENGTHS],
        "even_with_bfloat16": own.even(PLAIN),
        "instead": rung and rung.label,
        "even_with_instead": best and own.even(best),
    }


def refuse_other(facts: Facts | Further, results: Results) -> None:
    """`MixedIdentity` unless a record is of the model, text and calibration of the cells."""
    cells, own = results.provenance, facts.provenance
    pairs = {name: (getattr(cells, name), getattr(own, name)) for name in ("model_hash", "corpus_hash")}
    pairs["calibration"] = (cells.calibration.get(facts.origin), own.calibration.get(facts.origin))
    if wrong := {name: set(map(str, pair)) for name, pair in pairs.items() if pair[0] != pair[1]}:
        raise MixedIdentity(wrong)


def gain_entries(params: Params, facts: Facts, boot: Bootstrap, documents: Sequence[int] | None) -> list[dict]:
    """The part ``ladder_gain``: coding gain of each stream on each text, dB; `documents` are those of the windows."""
    numbers = sorted({one.window for one in facts.gains})
    if numbers != list(range(gain_windows(params))):
        raise MissingResult(
            f"the ladder's facts have a coding gain on {len(numbers)} windows where {gain_windows(params)} are planned;"
            " run `kvlab step ladder`"
        )
    fitted = {one.stream: one for one in facts.fitted}
    found = []
    for text, count in Counter(map(params.corpus.text_of, numbers)).items():
        if count < FEWEST:
            continue
        for stream, tokens in ((stream, tokens) for stream in ("k", "v") for tokens in ("all", "later")):
            mine = [
                one
                for one in facts.gains
                if (one.stream, one.tokens, params.corpus.text_of(one.window)) == (stream, tokens, text)
            ]
            found.append(
                {"text": text, "stream": stream, "tokens": tokens}
                | {
                    name: boot.mean(column([(one.window, getattr(one, name)) for one in mine], documents)).to_json()
                    for name in OVER
                }
                | {f"fitted_{name}": getattr(fitted[stream], name) for name in OVER}
            )
    return found


OVER = ("over_even", "over_plain")


def column(values: Sequence[tuple[int, float]], documents: Sequence[int] | None) -> Column:
    """One number of each window."""
    windows, numbers = zip(*values, strict=True)
    return Column.of(np.array(windows), np.zeros(len(windows)), np.array(numbers), documents)
