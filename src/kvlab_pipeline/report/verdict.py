"""A word for each codec cell, earned by the bounds of its intervals, and whether it may be published.

A point value decides nothing: an interval that touches a threshold is INCONCLUSIVE, with the number of
windows that would settle it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.core.errors import MissingResult, StaleResult
from kvlab.core.params import Params, VerdictSection
from kvlab.core.recipe import digest
from kvlab.core.records import CANARY_MIN
from kvlab.stats.bootstrap import USUAL_CONFIDENCE
from kvlab.stats.power import power_factor, windows_needed

NO_DIFFERENCE = "engines not shown to differ in fp32"
IDENTITY_FIELDS = ("model_hash", "corpus_hash", "calibration", "versions", "device")


def judge(params: Params, metrics: dict) -> dict:
    """The contents of ``verdict.json``.

    Parameters
    ----------
    params : Params
        Only `verdict` is read.
    metrics : dict
        ``metrics.json``.

    Returns
    -------
    dict
        ``cells`` (a verdict per codec cell in the dtype of the gap), ``preconditions``, ``publishable``
        (all of them hold) and ``cross_engine_allowed`` (two engines were measured and are not shown to differ in
        fp32: their numbers may stand side by side; whether they are equivalent is the metrics' ``agreement``).

    Raises
    ------
    MissingResult
        When the metrics hold no codec cell in the dtype of the gap.
    """
    dtype = metrics["gap"]["dtype"]
    cells = [cell for cell in metrics["cells"] if cell["role"] == "codec" and cell["dtype"] == dtype]
    if not cells:
        raise MissingResult(
            "the metrics hold no codec cell in the dtype of the gap; nothing can be judged",
            code="missing-result.codec-cell",
        )
    conditions = preconditions(metrics, cells)
    agreement = metrics["agreement"]
    return {
        "cells": [verdict_entry(params.verdict, cell) for cell in cells],
        "preconditions": conditions,
        "publishable": all(condition["holds"] for condition in conditions),
        "cross_engine_allowed": agreement is not None and agreement["state"] != "differ",
    }


def refuse_other_verdict(params: Params, metrics: dict, verdict: object) -> None:
    """`StaleResult` unless a verdict is what these thresholds make of these metrics."""
    if verdict != judge(params, metrics):
        raise StaleResult(
            "the verdict is not what params.yaml's thresholds make of these metrics; run `kvlab step verdict` again"
        )


# ------------------------------------------------------------------------------------- verdicts


def verdict_entry(thresholds: VerdictSection, cell: dict) -> dict:
    """One cell's word, the windows that an open one needs, and what it rests on."""
    word = decide(thresholds, cell["ppl_ratio"], cell["top1_agreement"])
    needed = None
    if word == "INCONCLUSIVE":
        needed = windows_to_settle(thresholds, cell["ppl_ratio"], cell["top1_agreement"])
    keys = ("cell_id", "recipe_id", "label", "engine", "dtype", "protocol", "variance_ratio")
    return {key: cell[key] for key in keys} | {
        "verdict": word,
        "windows_needed": needed,
        "reasons": reasons(thresholds, cell["ppl_ratio"], cell["top1_agreement"]),
    }


def decide(thresholds: VerdictSection, ppl_ratio: dict, top1: dict) -> str:
    """ACCEPT, MARGINAL, REJECT or INCONCLUSIVE.

    ACCEPT when the whole interval of abs(ppl_ratio - 1) is below `accept_ppl` and the lower bound of
    the top-1 agreement above `accept_top1`; MARGINAL likewise with `marginal_ppl` and `marginal_top1`;
    REJECT when the interval lies wholly above `marginal_ppl`, or the upper bound of the agreement
    below `marginal_top1`. A bound that equals its threshold has not passed it.
    """
    low, high = change_bounds(ppl_ratio)
    if high < thresholds.accept_ppl and top1["low"] > thresholds.accept_top1:
        return "ACCEPT"
    if high < thresholds.marginal_ppl and top1["low"] > thresholds.marginal_top1:
        return "MARGINAL"
    if low > thresholds.marginal_ppl or top1["high"] < thresholds.marginal_top1:
        return "REJECT"
    return "INCONCLUSIVE"


def change_bounds(ppl_ratio: dict) -> tuple[float, float]:
    """Bounds of abs(ppl_ratio - 1); the lower one is 0 when the interval holds 1."""
    low, high = ppl_ratio["low"] - 1, ppl_ratio["high"] - 1
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def windows_to_settle(thresholds: VerdictSection, ppl_ratio: dict, top1: dict) -> int | None:
    """Windows after which the point values, if they stay, earn some other word with a power of 80 %.

    The sides of an interval shrink with the root of the number of windows. None when a point value
    lies on the threshold that decides: no number of windows settles that.
    """
    change, width = abs(ppl_ratio["value"] - 1), widest_side(ppl_ratio)
    agree, width_top1 = top1["value"], widest_side(top1)
    n, factor = ppl_ratio["n_windows"], power_factor(ppl_ratio.get("confidence", USUAL_CONFIDENCE))
    passing = [
        (thresholds.accept_ppl - change, agree - thresholds.accept_top1),
        (thresholds.marginal_ppl - change, agree - thresholds.marginal_top1),
    ]
    options = [
        _both(windows_needed(width, room, n, factor), windows_needed(width_top1, room_top1, n, factor))
        for room, room_top1 in passing
    ]
    options.append(windows_needed(width, change - thresholds.marginal_ppl, n, factor))
    options.append(windows_needed(width_top1, thresholds.marginal_top1 - agree, n, factor))
    return min((option for option in options if option is not None), default=None)


def _both(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


def widest_side(estimate: dict) -> float:
    """From the value to the farther end of its interval."""
    return max(estimate["value"] - estimate["low"], estimate["high"] - estimate["value"])


def reasons(thresholds: VerdictSection, ppl_ratio: dict, top1: dict) -> list[str]:
    """Where each interval lies against its thresholds, in words."""
    low, high = change_bounds(ppl_ratio)
    change = _place(low, high, thresholds.accept_ppl, thresholds.marginal_ppl)
    agree = _place(1 - top1["high"], 1 - top1["low"], 1 - thresholds.accept_top1, 1 - thresholds.marginal_top1)
    return [
        f"perplexity changes by {100 * low:.3g} to {100 * high:.3g} %: {change}",
        f"top-1 agrees in {100 * top1['low']:.4g} to {100 * top1['high']:.4g} %: {agree}",
    ]


def _place(low: float, high: float, accept: float, marginal: float) -> str:
    if high < accept:
        return "inside the ACCEPT limit"
    if high < marginal:
        return "inside the MARGINAL limit" if low > accept else "inside the MARGINAL limit, across the ACCEPT limit"
    return "beyond the MARGINAL limit" if low > marginal else "across the MARGINAL limit"


# -------------------------------------------------------------------------------- preconditions


def preconditions(metrics: dict, cells: list[dict]) -> list[dict]:
    """What must hold before any verdict is published."""
    return [
        engines_do_not_differ(metrics),
        codecs_fired(metrics["cells"]),
        canaries_moved(cells),
        splits_disjoint(metrics["identity"]),
        one_identity(metrics),
    ]


def _condition(name: str, problems: Iterable[str], otherwise: str) -> dict:
    problems = list(problems)
    return {"name": name, "holds": not problems, "detail": "; ".join(problems) or otherwise}


def engines_do_not_differ(metrics: dict) -> dict:
    """In fp32 the engines are not shown to differ; each verdict is of one engine, so it may be open if they agree."""
    agreement, why = metrics["agreement"], metrics["agreement_why"]
    if agreement is None:
        return _condition(NO_DIFFERENCE, [], f"nothing to compare: {'; '.join(why)}")
    problems = (why or ["the metrics say that they do"]) if agreement["state"] == "differ" else []
    told = {
        "equivalent": "equivalent without a codec and with it, under every protocol",
        "open": "but whether they agree is open: " + "; ".join(why),
    }
    return _condition(NO_DIFFERENCE, problems, told.get(agreement["state"], ""))


def codecs_fired(cells: list[dict]) -> dict:
    """Every cell's codec fired exactly as often as layers, streams and windows ask."""
    problems = [
        f"{cell['label']} ({cell['engine']}, {cell['protocol']}) fired {cell['fires']} times, "
        f"expected {cell['expected_fires']}"
        for cell in cells
        if cell["fires"] != cell["expected_fires"] or (cell["role"] == "codec" and cell["fires"] == 0)
    ]
    return _condition("codecs fired", problems, f"{sum(cell['fires'] for cell in cells)} times, as expected")


def canaries_moved(cells: list[dict]) -> dict:
    """A one-bit codec in the same place moved the logits of every judged cell's job."""
    problems = [
        f"{cell['label']} ({cell['engine']}, {cell['protocol']}): canary KL {cell['canary_kl']}"
        for cell in cells
        if cell["canary_kl"] is None or cell["canary_kl"] < CANARY_MIN
    ]
    smallest = min((cell["canary_kl"] for cell in cells if cell["canary_kl"] is not None), default=0.0)
    return _condition("canary moved the logits", problems, f"by KL {smallest:.2g} nats per token at least")


def splits_disjoint(identity: dict) -> dict:
    """Calibration and test windows are the two splits of one windows file, disjoint by its making."""
    calib, test = identity.get("calibration_corpus_hash"), identity.get("corpus_hash")
    problems = []
    if not calib or not test:
        problems = ["the windows of the calibration or of the test are not recorded"]
    elif calib != test:
        problems = [f"calibrated on windows {calib}, scored on {test}; nothing says that they are disjoint"]
    return _condition("calibration and test disjoint", problems, f"both splits of windows {test}")


def one_identity(metrics: dict) -> dict:
    """Everything that identifies the numbers is recorded, and every recipe id is that of its recipe."""
    identity = metrics["identity"]
    problems = [f"{name} is not recorded" for name in IDENTITY_FIELDS if not identity.get(name)]
    recipes = identity["recipes"]
    problems += [f"recipe {name} is not that of its content" for name in recipes if digest(recipes[name]) != name]
    used = {cell["recipe_id"] for cell in metrics["cells"]}
    problems += [f"recipe {name} is not recorded" for name in sorted(used - set(recipes))]
    return _condition("one identity", problems, f"model {identity.get('model_hash')}, {len(recipes)} recipes")
