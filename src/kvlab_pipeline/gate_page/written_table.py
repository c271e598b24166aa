"""The page's table of what models write over a coded context: RULER's tasks, and greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlab.gate.evidence import Measure
from kvlab.output import format as fmt
from kvlab_pipeline.gate_page.row_summary import BASELINE, RowSummary
from kvlab_pipeline.studies.mechanisms.plan import GREEDY, GREEDY_TOKENS, METRICS, TASKS

WORDS = {
    "niah_single": "one needle",
    "niah_multikey": "one of four needles",
    "niah_multivalue": "two needles of one key",
    "vt": "variables tracked",
    "greedy_prefix": "tokens before the first other one",
    "greedy_same": "same next token",
}
"""Metrics as the page names them."""
NO_BREAK = "\N{NO-BREAK SPACE}"
UNTOLD = "cannot tell"


def written_table(lines: Sequence[RowSummary]) -> dict[str, Any] | None:
    """Columns and rows of one engine's table; None where nothing was written there."""
    there = [metric for metric in (*TASKS.values(), *METRICS[GREEDY]) if any(metric in line.metrics for line in lines)]
    if not there:
        return None
    asked = {metric: next(line.metrics[metric].n for line in lines if metric in line.metrics) for metric in there}
    return {
        "tokens": GREEDY_TOKENS,
        "tasks": any(metric in TASKS.values() for metric in there),
        "columns": [f"{WORDS[metric]}, % of {asked[metric]}" for metric in there],
        "lines": [
            {"label": label(line), "cells": [cell(metric, line) for metric in there]}
            for line in lines
            if any(metric in line.metrics for metric in there)
        ],
    }


def label(line: RowSummary) -> str:
    """As the other tables name a row."""
    return " ".join(filter(None, (line.mechanism_variant or line.mechanism, line.bits and str(line.bits))))


def cell(metric: str, line: RowSummary) -> str:
    """Of a task the score and, but for the baseline, its paired change; of greedy decoding the score alone."""
    measure, change = line.metrics.get(metric), line.paired.get(metric)
    if measure is None or line.mechanism == BASELINE or metric in METRICS[GREEDY] or change is None:
        return per_cent(measure, 0.0)
    told = f"{fmt.number(100 * measure.value)}; {per_cent(change, -1.0)}"
    return f"{told} ({UNTOLD})" if metric in line.untold else told


def per_cent(measure: Measure | None, least: float) -> str:
    """A value with its interval, cut to what it can be: a share from 0 to 1, a difference of two from -1 to 1."""
    if measure is None:
        return fmt.estimate(None)
    cut = {end: min(max(getattr(measure, end), least), 1.0) for end in ("low", "high")}
    return fmt.estimate(measure.model_dump() | cut, 100.0).replace(", ", f",{NO_BREAK}")
