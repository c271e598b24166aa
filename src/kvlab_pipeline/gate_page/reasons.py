"""GATE-reasons.md: what each row's claim rests on, and how far the gate itself can be trusted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvlab.gate.check import Claim, GateReport
from kvlab.gate.evidence.quality import Judgement
from kvlab.gate.render import left, p_value
from kvlab.gate.rules import CRITERIA, PUBLISHED, Criterion
from kvlab.output import format as fmt
from kvlab_pipeline.gate_page.power import WORDS
from kvlab_pipeline.gate_page.row_summary import RowSummary
from kvlab_pipeline.gate_page.summary import GateSummary


def reasons(report: GateReport, summary: GateSummary, found: dict[str, Any]) -> dict[str, Any]:
    """Everything that the template of the reasons names but its links, as text ready to print."""
    return {
        "details": [detail(line, report) for line in summary.rows if line.measured],
        "trust": trust_context(found),
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


# ------------------------------------------------------------------------------------- the gate itself


def trust_context(found: dict[str, Any]) -> dict[str, Any]:
    """How far the gate can be trusted, as text."""
    corruptions = found["mutations"]
    return {
        "made": len(corruptions),
        "detected": sum(line["detected"] for line in corruptions),
        "codes": len({line["code"] for line in corruptions}),
        "kinds": found["kinds"],
        "seen": sum(kind["published_sees"] for kind in found["kinds"]),
        "passed": sum(kind["published_passes"] for kind in found["kinds"]),
        "repeats": [repeat_line(repeat) for repeat in found["repeats"]],
        "corruptions": corruptions,
        "power": power_context(found["power"]) if found["power"] else None,
    }


def power_context(power: dict[str, Any]) -> dict[str, Any]:
    """False alarms and planted losses, as text."""
    registered = [alarm for alarm in power["alarms"] if alarm["allowed"] == "as registered"]
    return {
        "key": power["key"],
        "margin": fmt.percent(power["margin"]),
        "base_rate": fmt.percent(power["base_rate"]),
        "churn": fmt.percent(power["churn"]),
        "resamples": fmt.number(power["resamples"]),
        "often": fmt.percent(power["often"]),
        "nominal": fmt.percent(registered[0]["nominal"], 1),
        "alarms": [alarm_line(alarm) for alarm in power["alarms"]],
        "false": sum(alarm["beyond"] for alarm in registered),
        "open": sum(alarm["open"] for alarm in registered),
        "repeats": sum(alarm["resamples"] for alarm in registered),
        "curve": [curve_line(row) for row in power["curve"]],
        "needed": [
            {"loss": fmt.percent(row["loss"]), "word": row["word"], "size": fmt.whole(row["items"])}
            for row in power["needed"]
        ],
    }


def repeat_line(repeat: dict[str, Any]) -> dict[str, str]:
    """How often a baseline that was scored twice is called what, over resamples of its items."""
    counts = {word: fmt.number(repeat[word]) for word in WORDS}
    changed = f"{repeat['changed']} of {repeat['n_items']}"
    return {"where": repeat["where"], "key": repeat["key"], "changed": changed} | counts


def alarm_line(alarm: dict[str, Any]) -> dict[str, str]:
    """How often the baseline was called what against itself; how often worse also in per cent."""
    rate = {"value": alarm["rate"], "low": alarm["low"], "high": alarm["high"]}
    return {
        "allowed": alarm["allowed"],
        "answers": fmt.percent(alarm["base_rate"], 1),
        "size": fmt.number(alarm["n_items"]),
        "repeats": fmt.number(alarm["resamples"]),
        **{word: fmt.number(alarm[word]) for word in WORDS},
        "rate": f"{fmt.estimate(rate, 100)} %",
    }


def curve_line(row: dict[str, Any]) -> dict[str, str]:
    """How often each word was given for one loss and size."""
    shares = {word: fmt.percent(row[word], 1) for word in WORDS}
    given = {"answers": fmt.percent(row["base_rate"], 1), "churn": fmt.percent(row["churn"], 1)}
    return given | {"loss": fmt.percent(row["loss"]), "size": fmt.number(row["n_items"])} | shares


def criterion_line(criterion: Criterion) -> dict[str, str]:
    """One criterion as the page lists it."""
    return {
        "name": criterion.name,
        "published": "yes" if criterion.name in PUBLISHED else "no",
        "ceiling": left(criterion),
        "hard": "yes" if criterion.hard else "no",
        "why": criterion.why,
    }
