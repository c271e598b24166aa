"""Numbers at longer contexts and on parts of the calibration, from what ``kvlab step ladder_further`` wrote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvlab.core.errors import MissingResult, WitnessDisagrees
from kvlab.core.params import Params
from kvlab.stats.bootstrap import Bootstrap, Column, documents_of
from kvlab_pipeline.studies.checks import WITNESSED
from kvlab_pipeline.studies.ladder.numbers import FEWEST
from kvlab_pipeline.studies.ladder.record import Further, WindowScore, parts, read_further, wanted_further
from kvlab_pipeline.studies.ladder.state import refuse_other
from kvlab_pipeline.studies.measured import Results

Series = tuple[str, int, int]
"""Label, context and calibration tokens."""


def further_entries(params: Params, path: Path | None, results: Results, boot: Bootstrap) -> list[dict]:
    """The part ``ladder_further``; empty where the parameters do not ask for it.

    Raises
    ------
    MissingResult
        They do, and nothing was measured, or something else.
    """
    if not wanted_further(params):
        return []
    if path is None:
        raise MissingResult(
            "ladder.growth and ladder.contexts ask for more; run `kvlab step ladder_further`",
            code="missing-result.further",
        )
    record = read_further(path)
    refuse_other(record, results)
    refuse_incomplete(params, record, path)
    refuse_unwitnessed(record, path)
    context, documents = params.windows.context, results.select("ladder")[0].documents
    growth = [one for one in record.scores if one.context == context]
    found = entries(boot, "growth", growth, lambda series: max(series, key=lambda one: one[2]), documents)
    for length in params.ladder.contexts:
        mine = [one for one in record.scores if one.context == length]
        found += entries(boot, "context", mine, lambda series: series[0])
    return found


def refuse_incomplete(params: Params, record: Further, path: Path) -> None:
    """`MissingResult` where not all that is asked for was scored."""
    asked, windows = params.ladder, params.windows
    counts = [*parts(asked.growth, windows.calib), windows.calib] if asked.growth else []
    due = {(windows.context, count * windows.context) for count in counts}
    due |= {(length, windows.calib * windows.context) for length in set(asked.contexts) - set(record.left_out)}
    there = {(one.context, one.calibration_tokens) for one in record.scores}
    if there != due:
        raise MissingResult(
            f"{path} has contexts with tokens of calibration {sorted(there)}, asked for are {sorted(due)};"
            " run `kvlab step ladder_further` again",
            code="missing-result.other-contexts",
        )


def refuse_unwitnessed(record: Further, path: Path) -> None:
    """`WitnessDisagrees` where nothing was computed a second time, or what is written is not what was seen."""
    if record.scores and not record.witnessed:
        raise WitnessDisagrees(
            f"{path}: no witness computed any of its codecs again; measure again", code="witness.none"
        )
    for one in record.witnessed:
        written = [score.kl_sum / score.tokens for score in record.scores if score.window == one.window]
        apart = min((abs(kl - one.kl) for kl in written), default=math.inf)
        if apart > WITNESSED * (1 + one.kl) or one.effects != one.expected_effects:
            raise WitnessDisagrees(
                f"{path}: a witness saw KL {one.kl:.6g} on window {one.window}, with {one.effects} of"
                f" {one.expected_effects} tensors that reached attention, and no score says so; measure again",
                code="witness.other-numbers",
            )


def entries(
    boot: Bootstrap, what: str, scores: Sequence[WindowScore], first, documents: Sequence[int] | None = None
) -> list[dict]:
    """An entry for each series and text; `first` of all series is what the others are held against.

    `documents` are those of the windows, by number, where they are the scored ones.
    """
    found = []
    windows = {(one.text, one.window) for one in scores}
    for text, count in Counter(text for text, _ in sorted(windows)).items():
        if count < FEWEST:
            continue
        series: dict[Series, list[WindowScore]] = {}
        for one in (one for one in scores if one.text == text):
            series.setdefault((one.label, one.context, one.calibration_tokens), []).append(one)
        against = first(list(series))
        base = column(series[against], "kl_sum", documents)
        for (label, context, tokens), mine in series.items():
            kl, other = column(mine, "kl_sum", documents), (label, context, tokens) != against
            found.append(
                {
                    "what": what,
                    "text": text,
                    "label": label,
                    "context": context,
                    "calibration_tokens": tokens,
                    "bits_per_value": mine[0].bits_per_value,
                    "kl": boot.divergence(kl).to_json(),
                    "top1_agreement": boot.rate(column(mine, "agreeing", documents)).to_json(),
                    "against": against[0] if other else None,
                    "times": boot.ratio(kl, base).to_json() if other else None,
                }
            )
    return found


def column(scores: Sequence[WindowScore], name: str, documents: Sequence[int] | None) -> Column:
    """A sum of every window as a column."""
    ordered = sorted(scores, key=lambda one: one.window)
    windows, counts = tuple(one.window for one in ordered), np.array([float(one.tokens) for one in ordered])
    sums = np.array([float(getattr(one, name)) for one in ordered])
    key = f"further {ordered[0].context} {windows} {counts}"
    return Column(sums, counts, windows, key, int(counts.sum()), documents_of(windows, documents))
