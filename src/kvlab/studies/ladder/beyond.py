"""Numbers at longer contexts and on parts of the calibration, from what ``kvlab step ladder_further`` wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvlab.base.errors import MissingResult
from kvlab.base.params import Params
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.studies.gather import Results
from kvlab.studies.ladder.numbers import FEWEST
from kvlab.studies.ladder.record import Score, read_further, wanted_further
from kvlab.studies.ladder.state import refuse_other

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
        raise MissingResult("ladder.growth and ladder.contexts ask for more; run `kvlab step ladder_further`")
    record = read_further(path)
    refuse_other(record, results)
    context = params.windows.context
    growth = [one for one in record.scores if one.context == context]
    found = entries(boot, "growth", growth, lambda series: max(series, key=lambda one: one[2]))
    for length in params.ladder.contexts:
        mine = [one for one in record.scores if one.context == length]
        found += entries(boot, "context", mine, lambda series: series[0])
    parts = {one["calibration_tokens"] for one in found if one["what"] == "growth"}
    lengths = {one["context"] for one in found if one["what"] == "context"}
    due = len(params.ladder.growth) + 1 if params.ladder.growth else 0
    if len(parts) != due or lengths != set(params.ladder.contexts):
        raise MissingResult(
            f"{path} has {len(parts)} parts of the calibration and contexts {sorted(lengths)}, asked for are {due} and"
            f" {sorted(params.ladder.contexts)}; run `kvlab step ladder_further` again"
        )
    return found


def entries(boot: Bootstrap, what: str, scores: Sequence[Score], first) -> list[dict]:
    """An entry for each series and text; `first` of all series is what the others are held against."""
    found = []
    windows = {(one.text, one.window) for one in scores}
    for text, count in Counter(text for text, _ in sorted(windows)).items():
        if count < FEWEST:
            continue
        series: dict[Series, list[Score]] = {}
        for one in (one for one in scores if one.text == text):
            series.setdefault((one.label, one.context, one.calibration_tokens), []).append(one)
        against = first(list(series))
        base = column(series[against], "kl_sum")
        for (label, context, tokens), mine in series.items():
            kl, other = column(mine, "kl_sum"), (label, context, tokens) != against
            found.append(
                {
                    "what": what,
                    "text": text,
                    "label": label,
                    "context": context,
                    "calibration_tokens": tokens,
                    "bits_per_value": mine[0].bits_per_value,
                    "kl": boot.mean(kl).to_json(),
                    "top1_agreement": boot.rate(column(mine, "agreeing")).to_json(),
                    "against": against[0] if other else None,
                    "times": boot.ratio(kl, base).to_json() if other else None,
                }
            )
    return found


def column(scores: Sequence[Score], name: str) -> Column:
    """A sum of every window as a column."""
    ordered = sorted(scores, key=lambda one: one.window)
    windows, counts = tuple(one.window for one in ordered), np.array([float(one.tokens) for one in ordered])
    sums = np.array([float(getattr(one, name)) for one in ordered])
    return Column(sums, counts, windows, f"further {ordered[0].context} {windows} {counts}", int(counts.sum()))
