"""From two results of lm-evaluation-harness to item-by-item scores of a registered eval. Torch-free.

A result holds every item's score. Items are paired by task, number and hashes of question, prompt and target; both
sides must have the same. A metric counts only if its mean over items is what the harness itself reports: of an f1, of a
perplexity, or of a group whose tasks have unlike numbers of items that count alike, it is not, and an interval over
items would be one of something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvlab.core.errors import MixedIdentity, ParamsError, UserError
from kvlab.core.recipe import digest
from kvlab.gate.evidence import Measure, measured, paired
from kvlab.gate.registry import Eval, Metric

CONTEXT = "{context_tokens}"
NO_FILTER = "none"
SOURCES = {
    "ruler_avg_score": (CONTEXT, NO_FILTER),  # RULER calls its metrics by the length of the context
    "longbench_accuracy": ("acc", NO_FILTER),
    "humaneval_pass_at_1": ("pass@1", "create_test"),
    "math_500_accuracy": ("exact_match", NO_FILTER),
}
"""The harness's metric and filter of each shipped key."""


class ResultError(UserError):
    """A result of lm-evaluation-harness that no evidence can be made of."""

    code = "result"


class ItemKey(NamedTuple):
    """What makes an item the same on both sides: its task, its number, and hashes of what was asked."""

    task: str
    number: int
    question: str
    prompt: str
    target: str


class EvalMeasures(NamedTuple):
    """The three measures of a metric that evidence holds."""

    variant: Measure
    baseline: Measure
    paired: Measure


def needs_context(entry: Eval) -> bool:
    """Whether a metric is of one context length, which has to be given."""
    return any(source(metric.key)[0] == CONTEXT for metric in entry.metrics)


def source(key: str) -> tuple[str, str]:
    """The harness's metric and filter of a registered key: a shipped one's, or ``metric`` or ``metric.filter``."""
    if key in SOURCES:
        return SOURCES[key]
    metric, _, filtered = key.partition(".")
    return metric, filtered or NO_FILTER


def measures(
    entry: Eval, baseline: Mapping[str, Any], variant: Mapping[str, Any], context_tokens: int | None = None
) -> dict[str, EvalMeasures]:
    """Each registered metric's measures.

    Parameters
    ----------
    entry : Eval
    baseline, variant : mapping
        Results as `lm_eval.evaluator.evaluate` gives them, with samples.
    context_tokens : int, optional
        The length that RULER was run at.

    Raises
    ------
    ResultError
        A metric is not there, has too few items, or is no mean over items.
    MixedIdentity
        The two sides were not asked the same.
    """
    return {metric.key: _measured(entry, metric, baseline, variant, context_tokens) for metric in entry.metrics}


def corpus_hash(result: Mapping[str, Any]) -> str:
    """Digest of everything that was asked: tasks with their versions, items, prompts and targets."""
    questions = {
        name: sorted({tuple(_item(name, sample)[1:]) for sample in samples})
        for name, samples in result["samples"].items()
    }
    return digest({"versions": {name: str(result["versions"].get(name)) for name in questions}, "items": questions})


def _measured(
    entry: Eval,
    metric: Metric,
    baseline: Mapping[str, Any],
    variant: Mapping[str, Any],
    context_tokens: int | None,
) -> EvalMeasures:
    name, filtered = source(metric.key)
    if name == CONTEXT:
        if context_tokens is None:
            raise ParamsError(
                f"{entry.quality_eval_id} is measured at one context length; give it: --context-tokens N",
                code="params.no-context",
            )
        name = str(context_tokens)
    found = [_scores(entry, result, name, filtered) for result in (baseline, variant)]
    if found[0].keys() != found[1].keys():
        raise MixedIdentity({"items": (digest_of(found[0]), digest_of(found[1]))})
    items = sorted(found[0])
    if len(items) < 2:
        raise ResultError(
            f"{entry.quality_eval_id} has one item; an interval takes two, raise --limit", code="result.one-item"
        )
    plain, coded = (np.array([scores[item] for item in items]) for scores in found)
    return EvalMeasures(
        *(measured(scores, metric.rate) for scores in (coded, plain)), paired(coded, plain, metric.rate)
    )


def digest_of(scores: Mapping[ItemKey, float]) -> str:
    """Digest of the items."""
    return digest({"items": sorted(scores)})


def _scores(entry: Eval, result: Mapping[str, Any], name: str, filtered: str) -> dict[ItemKey, float]:
    """Every item's score, whose mean is what the harness reports."""
    scores: dict[ItemKey, float] = {}
    for task, samples in result["samples"].items():
        for sample in samples:
            if sample["filter"] != filtered:
                continue
            if name not in sample:
                allowed = ", ".join(str(metric) for metric in sample["metrics"])
                raise ResultError(
                    f"task {task!r} reports no metric {name!r} with the filter {filtered!r}; allowed: {allowed}",
                    code="result.no-metric",
                )
            scores[_item(task, sample)] = float(sample[name])
    if not scores:
        filters = sorted({sample["filter"] for samples in result["samples"].values() for sample in samples})
        raise ResultError(
            f"{entry.quality_eval_id} has no scores with the filter {filtered!r}; allowed: {', '.join(filters)}; the"
            f" registry's key names its filter, as {name}.{filters[0] if filters else 'strict-match'}",
            code="result.no-scores",
        )
    _refuse_other_mean(entry, result, f"{name},{filtered}", scores)
    return scores


def _refuse_other_mean(entry: Eval, result: Mapping[str, Any], key: str, scores: Mapping[ItemKey, float]) -> None:
    reported = result["results"].get(entry.task, {}).get(key)
    mean = math.fsum(scores.values()) / len(scores)
    if not isinstance(reported, int | float) or not math.isclose(reported, mean, rel_tol=1e-9, abs_tol=1e-9):
        counts = {task: len(samples) for task, samples in result["samples"].items()}
        uneven = f", whose tasks have {min(counts.values())} to {max(counts.values())} items" if len(counts) > 1 else ""
        raise ResultError(
            f"{key} of {entry.task!r} is {reported}, the mean of its items {mean:.6g}{uneven}: it is no mean over"
            " items, and no evidence can be made of it",
            code="result.no-mean",
        )


def _item(task: str, sample: Mapping[str, Any]) -> ItemKey:
    return ItemKey(task, sample["doc_id"], sample["doc_hash"], sample["prompt_hash"], sample["target_hash"])
