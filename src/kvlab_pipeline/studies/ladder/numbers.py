"""What every rung costs on each text, what its best rival costs, and which rung to use at how many bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import polars as pl

from kvlab.calibration.needs import needs_calibration
from kvlab.core.params import Params
from kvlab.core.recipe import WHOLE
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab_pipeline.studies.estimates import sides
from kvlab_pipeline.studies.gather import comparable
from kvlab_pipeline.studies.ladder.plan import ablations
from kvlab_pipeline.studies.measured import Measured, Results, column
from kvlab_pipeline.studies.tidy import (
    BITS,
    BYTES,
    COUNT,
    DECIBELS,
    NATS,
    RATIO,
    SHARE,
    TOKENS,
    Compared,
    Estimand,
    Level,
    Several,
)

TEXT = {"text": Level("test is held out of the text that calibrates, other is of another domain")}

# One codec at one setting on one text, over every layer's K and V, in float32.
LADDER = Several(
    TEXT
    | {
        "label": Level(),
        "codec": Level("the family: rungs of one codec are no rivals of each other"),
        "whole": Level("whether it codes finished caches alone: it is held against all, and is no rival of others"),
        "protocol": Level(),
        "span": Level(),
        "cell_id": Level(),
        "recipe_id": Level(),
        "calibrated": Level("whether the codec reads anything that was fitted to text"),
        "bits_per_value": Estimand(
            BITS, "every byte written for the context, also for tokens that a recipe keeps as they are; no calibration"
        ),
        "kl": Estimand(NATS),
        "top1_agreement": Estimand(SHARE),
        # Of the scored tokens that lie from `first` to `last` tokens after the end of the context.
        "by_offset": Several({"first": Level(), "last": Level(), "kl": Estimand(NATS)}),
        "rival": Level(
            "the rung of another codec with the least KL among those that store no more, or, of one that is whole, that"
            " fit the same half bit; null where there is none"
        ),
        "difference": Estimand(NATS, "KL minus the rival's, on the same tokens"),
        "compared": Compared(),
    }
)

# Which rung to use on one text at up to so many bits per value.
ANSWERS = Several(
    TEXT
    | {
        "whole": Level("of all rungs, for a cache that is kept; else of those that a model can run with"),
        "at_most": Level("bits per value"),
        "label": Level(),
        "bits_per_value": Estimand(BITS),
        "kl": Estimand(NATS),
        "tried": Estimand(COUNT, "rungs that store no more than at_most"),
        "ties": Level("those whose KL is not told from its: intervals of all differences hold together"),
    }
)

# `klt` with a part taken out, on one text, on the windows that it and its counterpart both score.
ABLATION = Several(
    TEXT
    | {
        "label": Level(),
        "against": Level(),
        "cell_id": Level(),
        "bits_per_value": Estimand(BITS),
        "kl": Estimand(NATS),
        "difference": Estimand(NATS, "KL minus that of against"),
        "times": Estimand(RATIO, "KL over that of against"),
        "compared": Compared(),
    }
)

# What a rung's cache takes with its calibration and its exact tokens.
STATE = Several(
    {
        "label": Level(),
        "recipe_id": Level(),
        "text": Level("on which it is set beside instead"),
        "rate": Estimand(BITS, "of a coded token"),
        "exact_tokens": Estimand(
            TOKENS,
            "kept in 16 bits: the recipe's, and under snapshot those between context and scored token",
        ),
        "whole_bytes": Estimand(BYTES, "the whole calibration as a file"),
        "decoder_bytes": Estimand(BYTES, "the part of it that decodes"),
        "resident_bytes": Estimand(BYTES, "what its codecs hold in memory, which at counts"),
        "at": Several({"tokens": Level(), "bits_per_value": Estimand(BITS, "of a whole cache of so many tokens")}),
        "even_with_bfloat16": Estimand(TOKENS, "from which on it stores no more than 16 bits a value; null for never"),
        "instead": Level(
            "of a calibrated rung: of those without calibration and no more KL the one that stores least; null for none"
        ),
        "even_with_instead": Estimand(TOKENS, "from which on it stores no more than that one"),
    }
)

# Coding gain of K or of V, the mean over layers and KV heads; 6.02 dB are one bit per value.
GAIN = Several(
    TEXT
    | {
        "stream": Level(),
        "tokens": Level("all; later leaves the first token of each window out, where attention sinks are"),
        "over_even": Estimand(DECIBELS, "over as many bits for every dimension of the metric's own frame"),
        "over_plain": Estimand(DECIBELS, "over as many bits for every dimension of the values as they are"),
        "fitted_over_even": Estimand(DECIBELS, "the same by the calibration's own moments, all tokens"),
        "fitted_over_plain": Estimand(DECIBELS),
    }
)

# A codec at a longer context, or `klt` fitted on a part of the calibration, on one text.
FURTHER = Several(
    {"what": Level("growth or context")}
    | TEXT
    | {
        "label": Level(),
        "context": Level(),
        "calibration_tokens": Level(),
        "bits_per_value": Estimand(BITS),
        "kl": Estimand(NATS),
        "top1_agreement": Estimand(SHARE),
        "against": Level(
            "growth: the same codec with the whole calibration; context: the first codec there; null for that one"
        ),
        "times": Estimand(RATIO, "KL over that of against, on the same tokens"),
    }
)

PARTS = {
    "ladder": LADDER,
    "ladder_answers": ANSWERS,
    "ladder_ablation": ABLATION,
    "ladder_state": STATE,
    "ladder_gain": GAIN,
    "ladder_further": FURTHER,
}

CHANGED = {"recipe", "placement"}  # all that two rungs may differ in; where K is coded belongs to the codec
PLAIN = ("snapshot", "context")
FEWEST = 2  # windows of a text; of one there is no interval
SAME_BITS = 0.005  # relative; so much more counts as no more
STEP = 2  # answers are given at multiples of half a bit
OFFSETS = (1, 8, 32, 128, 512, 2048)  # after the context; where one bin of scored tokens ends the next begins


@dataclass(frozen=True, eq=False)
class Rung:
    """One cell of the ladder on one of the texts that its windows are cut from."""

    measured: Measured
    text: str
    windows: tuple[int, ...]
    against: str | None = None
    """Of `klt` with a part taken out: what it is held against."""

    @property
    def label(self) -> str:
        """Its name on the ladder."""
        return self.measured.cell.label

    @property
    def codec(self) -> str:
        """The family that it belongs to."""
        return self.measured.cell.recipe.k.codec

    @property
    def whole(self) -> bool:
        """Whether it codes finished caches alone, all layers at once."""
        return self.codec in WHOLE

    @property
    def bits(self) -> float:
        """Stored, per value."""
        return self.measured.record.coding.bits_per_value

    @property
    def conditions(self) -> tuple[str, str, str]:
        """Only rungs on one text under one protocol are held against each other."""
        return self.text, self.measured.cell.protocol, self.measured.cell.span

    @property
    def plain(self) -> bool:
        """Whether it is a rung over the coded clean cache, which all codecs have, and nothing is taken out of it."""
        return self.against is None and self.conditions[1:] == PLAIN

    def column(self, quantity: str, count: int | None = None) -> Column:
        """A quantity on the windows of this text, of the first `count` of all windows if given."""
        windows = [number for number in self.windows if count is None or number < count]
        return self.measured.column(quantity, count).of_windows(windows)


def rungs_of(params: Params, results: Results) -> list[Rung]:
    """Every cell of the ladder on each text that two of its windows or more come from, in the plan's order."""
    found, against = [], {one.label: one.against for one in ablations(params)}
    for measured in results.select("ladder"):
        numbers, text = range(measured.cell.windows), measured.cell.text
        texts = {i: params.corpus.text_of(i) if text == "test" else text for i in numbers}
        for one in dict.fromkeys(texts.values()):
            mine = tuple(i for i in numbers if texts[i] == one)
            if len(mine) >= FEWEST:
                found.append(Rung(measured, one, mine, against.get(measured.cell.label)))
    return found


def ladder_entries(boot: Bootstrap, rungs: Sequence[Rung]) -> dict[str, list[dict]]:
    """The parts ``ladder``, ``ladder_answers`` and ``ladder_ablation``."""
    whole = [one for one in rungs if one.against is None]
    return {
        "ladder": [rung_entry(boot, one, whole) for one in whole],
        "ladder_answers": answers(boot, [one for one in whole if one.plain]),
        "ladder_ablation": [ablation_entry(boot, one, rungs) for one in rungs if one.against],
    }


def ablation_entry(boot: Bootstrap, one: Rung, rungs: Sequence[Rung]) -> dict:
    """`klt` less a part beside what has it, on the windows that both score."""
    (other,) = [rung for rung in rungs if rung.label == one.against and rung.conditions == one.conditions]
    comparable([one.measured, other.measured], CHANGED | {"windows"})
    count = min(one.measured.cell.windows, other.measured.cell.windows)
    mine, theirs = (rung.column("kl", count) for rung in (one, other))
    return {
        "text": one.text,
        "label": one.label,
        "against": one.against,
        "cell_id": one.measured.record.cell_id,
        "bits_per_value": one.bits,
        "kl": boot.divergence(mine).to_json(),
        "difference": boot.difference(mine, theirs).to_json(),
        "times": boot.ratio(mine, theirs).to_json(),
        "compared": sides(one.measured, other.measured),
    }


def rung_entry(boot: Bootstrap, one: Rung, rungs: Sequence[Rung]) -> dict:
    """A rung, and what it costs beside the best that stores no more."""
    cell = one.measured.cell
    return {
        "text": one.text,
        "label": one.label,
        "codec": one.codec,
        "whole": one.whole,
        "protocol": cell.protocol,
        "span": cell.span,
        "cell_id": cell.cell_id,
        "recipe_id": cell.recipe_id,
        "calibrated": any(map(needs_calibration, (cell.recipe.k, cell.recipe.v))),
        "bits_per_value": one.bits,
        "kl": boot.divergence(one.column("kl")).to_json(),
        "top1_agreement": boot.rate(one.column("top1_agreement")).to_json(),
        "by_offset": list(by_offset(boot, one)),
    } | beside_rival(boot, one, rival_of(one, rungs))


def rival_of(one: Rung, rungs: Sequence[Rung]) -> Rung | None:
    """The best rung of another codec that stores no more, under the same conditions.

    A codec of whole caches is no rival of others, in whose place it cannot stand while a model runs. It is held against
    all that fit the same half bit, as its bits are its own choice and theirs are not.
    """
    able = [
        other
        for other in rungs
        if other.conditions == one.conditions
        and other.codec != one.codec
        and other.whole <= one.whole
        and (limit_of(other.bits) <= limit_of(one.bits) if one.whole else other.bits <= one.bits * (1 + SAME_BITS))
    ]
    return min(able, key=lambda other: other.column("kl").means.mean(), default=None)


def beside_rival(boot: Bootstrap, one: Rung, rival: Rung | None) -> dict:
    """The difference to a rival, token by token."""
    if rival is None:
        return {"rival": None, "difference": None, "compared": None}
    comparable([one.measured, rival.measured], CHANGED)
    apart = boot.difference(one.column("kl"), rival.column("kl"))
    return {
        "rival": rival.label,
        "difference": apart.to_json(),
        "compared": sides(one.measured, rival.measured),
    }


def by_offset(boot: Bootstrap, one: Rung) -> Iterator[dict]:
    """KL near the coded context and far from it: bins whose ends double twice, over what is scored."""
    measured = one.measured
    start, scored = measured.context, measured.tokens.filter(pl.col("window").is_in(one.windows))
    last = measured.eval - 1
    ends = [end for end in OFFSETS if end <= last] + [last + 1]
    for first, end in pairwise(ends):
        rows = scored.filter(pl.col("position").is_between(start + first, start + end - 1))
        if rows.height:
            kl = boot.divergence(column(rows, "kl", None, measured.documents))
            yield {"first": first, "last": end - 1, "kl": kl.to_json()}


# --------------------------------------------------------------------------------------- what to use


def answers(boot: Bootstrap, rungs: Sequence[Rung]) -> list[dict]:
    """For each text and every half bit at which another rung fits: the rung of least KL, and its ties.

    First of those that a model can run with; and then, at the limits of codecs of whole caches, of all, for a cache
    that is kept.
    """
    found = []
    for whole in (False, True):
        able = [one for one in rungs if one.whole <= whole]
        for text in dict.fromkeys(one.text for one in able):
            mine = [one for one in able if one.text == text]
            for limit in sorted({limit_of(one.bits) for one in mine if one.whole or not whole}):
                fitting = [one for one in mine if limit_of(one.bits) <= limit]
                found.append({"whole": whole} | answer(boot, limit, fitting))
    return found


def limit_of(bits: float) -> float:
    """The multiple of half a bit that a rung fits into, but for a hair."""
    return math.ceil(STEP * bits / (1 + SAME_BITS)) / STEP


def answer(boot: Bootstrap, limit: float, able: Sequence[Rung]) -> dict:
    """The best of some rungs.

    Which one is best is chosen on the tokens that it is then compared on, so that the intervals of the others'
    differences to it are Bonferroni's, all at once: those who hold zero are not told from the best (multiple
    comparisons with the best; Hsu 1984, Annals of Statistics 12, in the conservative form).
    """
    best = min(able, key=lambda one: one.column("kl").means.mean())
    others = [one for one in able if one is not best]
    level = 1 - (1 - boot.confidence) / max(1, len(others))
    together = replace(boot, confidence=level)
    ties = [one.label for one in others if together.difference(one.column("kl"), best.column("kl")).low <= 0]
    return {
        "text": best.text,
        "at_most": limit,
        "label": best.label,
        "bits_per_value": best.bits,
        "kl": boot.divergence(best.column("kl")).to_json(),
        "tried": len(able),
        "ties": ties,
    }
