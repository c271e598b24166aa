"""How far the gate can be trusted, in numbers: corruptions that it finds, false alarms, and planted losses.

Everything is computed anew from seeds, by the rules that rows are judged by, and takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kvlab.gate.registry import Metric, Registry
from kvlab_pipeline.gate_page.samples import Repeat
from validation.gate import corruptions as planted
from validation.gate.power import CHURN, LOSSES, SIZES, detection_curve, false_alarm, items_needed, repeated

EVAL = "needle"
BASE_RATE = 0.9  # of the items, that the baseline answers
RESAMPLES = 200
RESAMPLES_OF_THE_STRICTEST = 4000  # its rate is near the nominal one, so more are needed to tell them apart
MOST = 20_000  # items; more would take longer and show nothing else
OFTEN = 0.8  # of the repeats
NEXT_TO_NOTHING = 1e-9  # of a metric's unit: then the interval's end alone decides


def trust(
    registry: Registry,
    baselines: Iterable[tuple[float, int]] = (),
    repeats: Iterable[tuple[str, Repeat]] = (),
) -> dict[str, Any]:
    """All numbers.

    Parameters
    ----------
    registry : Registry
        Whose `EVAL` the made-up items are judged by.
    baselines : iterable of (float, int)
        Share of the items that a baseline of this run answered, and how many items these were; tried beside what is
        always tried, unless its share is below the eval's floor, which then decides.
    repeats : iterable of (str, Repeat)
        Baselines that really were scored twice, with where.

    Returns
    -------
    dict
        ``mutations``: a line for each corruption (`corruptions.table`), and ``kinds``: what `kinds` counts of them.
        ``repeats``: what `words_of` finds of each. ``power``: what `losses` finds, or None without such an eval.
    """
    corruptions = planted.table()
    entry = registry.eval(EVAL)
    metric = entry.metrics[0] if entry and entry.metrics[0].direction == "higher" else None
    own = sorted({(rate, size) for rate, size in baselines if 0 < size <= MOST})
    return {
        "mutations": corruptions,
        "kinds": kinds(corruptions),
        "repeats": [found for where, repeat in repeats for found in words_of(where, repeat, registry)],
        "power": losses(metric, own) if metric else None,
    }


def kinds(corruptions: list[dict]) -> list[dict]:
    """Of each place: how many corruptions are made and detected, how many the published rules could see and passed."""
    lines = {where: [one for one in corruptions if one["where"] == where] for where in _places(corruptions)}
    return [
        {
            "where": where,
            "made": len(mine),
            "detected": sum(one["detected"] for one in mine),
            "published_sees": sum(one["published_sees"] for one in mine),
            "published_passes": sum(one["published_sees"] and one["published_would_pass"] for one in mine),
        }
        for where, mine in lines.items()
    ]


def _places(corruptions: list[dict]) -> list[str]:
    return list(dict.fromkeys(one["where"] for one in corruptions))


def words_of(where: str, repeat: Repeat, registry: Registry) -> Iterator[dict[str, Any]]:
    """How often a repeated baseline is called what; nothing where its eval or metric is not registered."""
    entry = registry.eval(repeat.quality_eval_id)
    for metric in entry.metrics if entry else ():
        if metric.key == repeat.metric:
            found = repeated(metric, repeat.second, repeat.first, repeat.rate, RESAMPLES)
            changed = int((repeat.second != repeat.first).sum())
            told = {"where": where, "key": metric.key, "n_items": len(repeat.first), "changed": changed}
            yield told | {"resamples": RESAMPLES} | found


def losses(metric: Metric, own: list[tuple[float, int]]) -> dict[str, Any]:
    """False alarms and planted losses of items that are answered or not; `own` as the baselines of `trust`.

    Returns
    -------
    dict
        ``alarms``: a baseline against itself, by size, as registered and with next to nothing allowed.
        ``curve``: how often each word is given for a planted loss, also of baselines as `own`. ``needed``: the items
        after which a loss outside the margin is called ``beyond``, and one inside it ``within``, as often as ``often``
        says.
    """
    strictest = metric.model_copy(update={"margin": NEXT_TO_NOTHING, "floor": None})
    sizes = sorted({*SIZES, *(size for _, size in own)})
    seen = [(rate, size) for rate, size in own if metric.floor is None or rate >= metric.floor]
    alarms = [_alarm("as registered", metric, BASE_RATE, size, RESAMPLES) for size in sizes]
    alarms += [_alarm("as registered", metric, rate, size, RESAMPLES) for rate, size in seen]
    alarms += [_alarm("next to nothing", strictest, BASE_RATE, size, RESAMPLES_OF_THE_STRICTEST) for size in SIZES]
    curve = detection_curve(metric, n_items=sizes, resamples=RESAMPLES, base_rate=BASE_RATE)
    for rate, size in seen:
        churn = min(CHURN, 2 * (1 - rate))  # a baseline that misses next to nothing can gain next to nothing
        if rate >= max(LOSSES) + churn / 2:
            curve += detection_curve(metric, n_items=[size], resamples=RESAMPLES, base_rate=rate, churn=churn)
    words = [(loss, "within" if loss < metric.margin else "beyond") for loss in LOSSES if loss != metric.margin]
    return {
        "key": metric.key,
        "margin": metric.margin,
        "base_rate": BASE_RATE,
        "churn": CHURN,
        "resamples": RESAMPLES,
        "often": OFTEN,
        "alarms": alarms,
        "curve": curve,
        "needed": [
            {"loss": loss, "word": word, "items": items_needed(metric, loss, word, OFTEN, base_rate=BASE_RATE)}
            for loss, word in words
        ],
    }


def _alarm(allowed: str, metric: Metric, rate: float, size: int, resamples: int) -> dict[str, Any]:
    return {"allowed": allowed, "base_rate": rate} | false_alarm(metric, np.full(size, rate), resamples)
