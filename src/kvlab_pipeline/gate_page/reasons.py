"""GATE-reasons.md: what each row's claim rests on, and by what it is judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvlab.gate.check import Claim, GateReport
from kvlab.gate.evidence.quality import Judgement
from kvlab.gate.render import left, p_value
from kvlab.gate.rules import CRITERIA, PUBLISHED, Criterion
from kvlab.output import format as fmt
from kvlab_pipeline.gate_page.row_summary import RowSummary
from kvlab_pipeline.gate_page.summary import GateSummary


def reasons(report: GateReport, summary: GateSummary) -> dict[str, Any]:
    """Everything that the template of the reasons names but its links, as text ready to print."""
    return {
        "details": [detail(line, report) for line in summary.rows if line.measured],
        "tested": report.tested,
        "alpha": fmt.percent(report.alpha, 1),
        "registry": report.registry,
        "current": report.current,
        "criteria": [criterion_line(criterion) for criterion in CRITERIA],
    }


# -------------------------------------------------------------------------------- what a claim rests on


def detail(line: RowSummary, report: GateReport) -> dict[str, Any]:
    """Everything that the gate found of one row."""
    claim = next(c for c in report.claims if (c.row["run"], c.row["row_id"]) == (line.run, line.row_id))
    return {
        "row_id": line.row_id,
        "earned": line.earned or line.badge,
        "badge": line.badge,
        "reasons": list(reason_lines(claim)),
        "judgements": [judgement_line(judgement) for judgement in claim.judgements],
        "p": None if claim.p is None else p_value(claim.p),
        "adjusted_p": p_value(claim.adjusted_p),
    }


def reason_lines(claim: Claim) -> Iterator[dict[str, str]]:
    """Each reason with the criterion that it is of, and whether it keeps the row from its claim."""
    for finding in claim.findings:
        for reason in finding.reasons:
            yield {
                "criterion": finding.criterion,
                "counts": "yes" if finding.counts else "no",
                "code": reason.code,
                "said": f"{reason.field} {reason.said}",
            }


def judgement_line(judgement: Judgement) -> dict[str, str]:
    """One metric's loss, what is allowed, and the word."""
    loss = None
    if judgement.loss is not None:
        loss = {"value": judgement.loss, "low": judgement.low, "high": judgement.high}
    return {
        "key": judgement.key,
        "loss": fmt.estimate(loss),
        "margin": fmt.number(judgement.margin),
        "room": fmt.number(judgement.room),
        "word": judgement.word,
        "p": p_value(judgement.p),
        "needed": fmt.whole(judgement.needed_n),
    }


def criterion_line(criterion: Criterion) -> dict[str, str]:
    """One criterion as the page lists it."""
    return {
        "name": criterion.name,
        "published": "yes" if criterion.name in PUBLISHED else "no",
        "ceiling": left(criterion),
        "hard": "yes" if criterion.hard else "no",
        "why": criterion.why,
    }
