"""What holds across the models: each factor's share of the gap on every model, and on how many it holds.

An interval over windows says nothing of another model: training a model anew moves its KL by far more than its windows
scatter. So what is headlined is the share of the gap, and whether models agree on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlab.core.errors import NonFinite
from kvlab.output import format as fmt
from kvlab.stats.bootstrap import Bootstrap
from kvlab.stats.shapley import shapley
from kvlab_pipeline.rendering.withheld import crosses, undecided, withheld_because
from kvlab_pipeline.studies.factors.chapter import ENGINE
from kvlab_pipeline.studies.factors.numbers import from_windows

FEWEST = 3  # families of models; an effect on one or two is an anecdote
RAISES, LOWERS, OPEN, WITHHELD = "raises", "lowers", "open", "withheld"


def build(found: Sequence[dict]) -> list[dict]:
    """One entry per factor that every model varies; empty with one model.

    Parameters
    ----------
    found : sequence of dict
        ``metrics.json`` of each model.

    Returns
    -------
    list of dict
        ``factor``, ``verdict`` (`verdict`), and ``models``: for each its ``model``, ``share`` (of KL, in nats per
        token), ``of_gap`` (the share over the gap, with its interval over windows) and ``reading``. The numbers are
        None where they are withheld, and ``of_gap`` also where the gap itself is not told from zero.
    """
    if len(found) < 2:
        return []
    factors = [name for name in found[0]["gap"]["factors"] if all(name in one["gap"]["factors"] for one in found)]
    rows = {factor: [] for factor in factors}
    for metrics in found:
        fractions = of_gap(metrics)
        for factor in factors:
            rows[factor].append(on_model(metrics, factor, fractions))
    kinds = families(found)
    return [
        {"factor": name, "models": row, "verdict": verdict([one["reading"] for one in row], kinds)}
        for name, row in rows.items()
    ]


def families(found: Sequence[dict]) -> int:
    """How many of the models have nothing to do with one another.

    Those that cut one text into the same windows share a tokenizer: sizes of one family, or one network at two times.
    """
    return len({metrics["identity"]["corpus_hash"] for metrics in found})


def on_model(metrics: dict, factor: str, fractions: dict[str, dict]) -> dict:
    """A factor's share on one model, and how it is read."""
    shared = {"model": metrics["identity"]["slug"]}
    if crosses(metrics["gap"]) and withheld_because(metrics, {}):
        return shared | {"share": None, "of_gap": None, "reading": WITHHELD}
    parts = metrics["gap"]["measures"]["kl"]["parts"]
    share = next(part["share"] for part in parts if part["factor"] == factor)
    held = factor == ENGINE and undecided(metrics) is not None
    return shared | {"share": share, "of_gap": fractions.get(factor), "reading": OPEN if held else reading(share)}


def reading(share: dict) -> str:
    """What a share does to KL, where its interval leaves zero out."""
    return OPEN if fmt.contains_zero(share) else RAISES if share["value"] > 0 else LOWERS


def of_gap(metrics: dict) -> dict[str, dict]:
    """Each share over the gap, with its interval over windows; empty where the gap is not told from zero."""
    gap, sizes = metrics["gap"], metrics["sizes"]
    if fmt.contains_zero(gap["measures"]["kl"]["gap"]):
        return {}
    boot = Bootstrap(sizes["resamples"], sizes["confidence"], sizes["seed"])
    try:
        found = boot.combine_many(from_windows(gap["windows"]), fractions)
    except NonFinite:  # a resample whose gap is zero
        return {}
    return {name: one.to_json() for name, one in zip(gap["factors"], found, strict=True)}


def fractions(corners: np.ndarray) -> np.ndarray:
    """Shares over the gap [..., factors], of corner means [..., 2**factors]."""
    return shapley(corners) / (corners[..., -1:] - corners[..., :1])


def verdict(readings: Sequence[str], kinds: int | None = None) -> str:
    """On how many models a factor does the same, in words.

    Nothing is corrected for the number of models: "on all" asks every one of them (an intersection-union test).
    `kinds` is of how many families they are, where that is not of one each.
    """
    counts = {name: readings.count(name) for name in (RAISES, LOWERS)}
    total, clear = len(readings), sum(counts.values())
    of = "models" if kinds in (None, total) else f"models of {kinds} {'family' if kinds == 1 else 'families'}"
    few = "" if (total if kinds is None else kinds) >= FEWEST else f"; {total} {of} are too few to say more"
    if counts[RAISES] and counts[LOWERS]:
        return f"models disagree: raises KL on {counts[RAISES]}, lowers it on {counts[LOWERS]}{few}"
    if not clear:
        return f"open on all {total}{few}"
    verb = "raises" if counts[RAISES] else "lowers"
    if clear == total:
        return f"holds on all {total}: {verb} KL{few}"
    return f"holds on {clear} of {total}: {verb} KL there{few}"
