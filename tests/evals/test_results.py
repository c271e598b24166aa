"""From results of lm-evaluation-harness to measures: the right items, the right metric, or no number."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from kvlab.core.errors import MixedIdentity, ParamsError
from kvlab.evals.results import CONTEXT, SOURCES, ResultError, corpus_hash, measures, needs_context, source
from kvlab.gate import registry
from refusals import refused

REGISTRY = registry.load()


def result(
    task: str, metric: str, filtered: str, scores: dict[str, list[float]], reported: float | None = None
) -> dict:
    """What the harness gives, as far as it is read; `scores` by task of a group."""
    samples = {
        name: [
            {"doc_id": number, "doc_hash": f"d{number}", "prompt_hash": f"p{number}", "target_hash": f"t{number}"}
            | {"filter": filtered, "metrics": [metric], metric: score}
            for number, score in enumerate(listed)
        ]
        for name, listed in scores.items()
    }
    every = [score for listed in scores.values() for score in listed]
    mean = sum(every) / len(every) if reported is None else reported
    results = {task: {f"{metric},{filtered}": mean}}
    return {"results": results, "versions": dict.fromkeys(scores, 1.0), "samples": samples}


def of_entry(quality_eval_id: str, variant: dict[str, list[float]], baseline: dict[str, list[float]], tokens=4096):
    entry = REGISTRY.eval(quality_eval_id)
    metric, filtered = source(entry.metrics[0].key)
    name = str(tokens) if metric == CONTEXT else metric
    sides = [result(entry.task, name, filtered, scores) for scores in (baseline, variant)]
    return measures(entry, *sides, tokens)[entry.metrics[0].key]


@pytest.mark.parametrize("quality_eval_id", ["ruler_v1", "longbench_v2", "humaneval", "math_500"])
def test_every_shipped_eval_of_the_harness_knows_its_metric(quality_eval_id):
    entry = REGISTRY.eval(quality_eval_id)
    assert {metric.key for metric in entry.metrics} <= SOURCES.keys()
    found = of_entry(quality_eval_id, {"a": [1, 0, 0, 0], "b": [1, 1, 0, 0]}, {"a": [1, 1, 0, 0], "b": [1, 1, 0, 0]})
    assert (found.variant.value, found.baseline.value, found.paired.value) == (0.375, 0.5, -0.125)
    assert found.variant.n == found.paired.n == 8


def test_no_eval_of_the_harness_is_registered_without_a_source():
    listed = [entry for entry in REGISTRY.evals.values() if entry.harness == "lm-evaluation-harness"]
    assert {metric.key for entry in listed for metric in entry.metrics} == SOURCES.keys()


def test_ruler_is_of_one_length_and_its_parts_of_an_answer_are_no_rate():
    found = of_entry("ruler_v1", {"a": [0.5, 1, 0.25]}, {"a": [1, 1, 0.75]})
    assert found.paired.value == pytest.approx(-1 / 3)
    entry = REGISTRY.eval("ruler_v1")
    assert needs_context(entry) and not needs_context(REGISTRY.eval("humaneval"))
    with refused(ParamsError, "params.no-context", "--context-tokens"):
        measures(entry, {}, {}, None)
    side = result("ruler", "4096", "none", {"a": [1, 0]})
    with refused(ResultError, "result.no-metric", "'8192'", "allowed: 4096"):
        measures(entry, side, side, 8192)


def test_a_key_of_ones_own_is_the_harness_metric_and_may_name_a_filter():
    assert source("exact_match") == ("exact_match", "none")
    assert source("exact_match.strict-match") == ("exact_match", "strict-match")


def test_items_are_paired_by_what_was_asked_not_by_where_they_stand():
    entry = REGISTRY.eval("longbench_v2")
    plain, coded = (result("longbench2", "acc", "none", {"a": scores}) for scores in ([1, 1, 0], [0, 1, 0]))
    coded["samples"]["a"].reverse()
    assert measures(entry, plain, coded)["longbench_accuracy"].paired.value == pytest.approx(-1 / 3)


@pytest.mark.parametrize("field", ["doc_hash", "prompt_hash", "target_hash", "doc_id"])
def test_sides_that_were_asked_otherwise_are_not_compared(field):
    plain = result("longbench2", "acc", "none", {"a": [1, 0, 1]})
    other = copy.deepcopy(plain)
    other["samples"]["a"][1][field] = 9 if field == "doc_id" else "else"
    assert corpus_hash(plain) != corpus_hash(other) or field == "doc_id"
    with pytest.raises(MixedIdentity):
        measures(REGISTRY.eval("longbench_v2"), plain, other)


def test_a_metric_that_is_no_mean_over_items_makes_no_evidence():
    side = result("longbench2", "acc", "none", {"a": [1, 0], "b": [1, 1, 1, 1]}, reported=(0.5 + 1) / 2)
    with refused(ResultError, "result.no-mean", "2 to 4 items"):
        measures(REGISTRY.eval("longbench_v2"), side, side)


def test_one_item_or_another_filter_makes_none_either():
    entry = REGISTRY.eval("longbench_v2")
    single = result("longbench2", "acc", "none", {"a": [1]})
    with refused(ResultError, "result.one-item", "longbench_v2"):
        measures(entry, single, single)
    filtered = result("longbench2", "acc", "strict", {"a": [1, 0]})
    with refused(ResultError, "result.no-scores", "allowed: strict;"):
        measures(entry, filtered, filtered)


def test_the_corpus_is_what_was_asked_and_of_which_version():
    plain = result("longbench2", "acc", "none", {"a": [1, 0]})
    other = result("longbench2", "acc", "none", {"a": [0, 0]})
    assert corpus_hash(plain) == corpus_hash(other)
    other["versions"]["a"] = 2.0
    assert corpus_hash(plain) != corpus_hash(other)


def test_evidence_is_made_without_torch(root):
    program = (
        "import sys, kvlab.cli.evals, kvlab.evals.results, kvlab.evals.evidence, kvlab.evals.canary;"
        "print([m for m in ('torch', 'transformers', 'vllm', 'lm_eval') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(root / "src")}
    )
    assert found.stdout.strip() == "[]", found.stderr
