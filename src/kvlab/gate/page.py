"""GATE.md: a template over what the gate says of measured rows, and over how far the gate itself can be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from kvlab.gate import markdown
from kvlab.gate.audit.trust import trust
from kvlab.gate.cases import Context
from kvlab.gate.catalogue.columns import TIERS
from kvlab.gate.catalogue.rows import Row
from kvlab.gate.check import Claim, Report
from kvlab.gate.detection import draw, table
from kvlab.gate.evidence import Measure
from kvlab.gate.evidence.measures import CONFIDENCE
from kvlab.gate.evidence.power import WORDS
from kvlab.gate.evidence.quality import Judgement
from kvlab.gate.rules import CRITERIA, PUBLISHED
from kvlab.gate.samples import Repeat, Samples
from kvlab.gate.summary import BASELINE, CERTIFIED, Best, Line, Ratio, Summary, judged
from kvlab.records import atomic, write_json, write_text
from kvlab.report import format as fmt
from kvlab.report.figures.canvas import save

FIGURE = "detection"
NO_BREAK = "\N{NO-BREAK SPACE}"
PER_CENT = 100.0
NEEDLES = "needle_recall"
RATES = ("top1_agreement", NEEDLES)
METRICS = ("kl", "delta_nll", *RATES)
TITLES = {"throughput_tok_s": "throughput", "bits_per_value": "size"}


def write(
    rows: Sequence[Row], context: Context, out: Path, claims: Path | None = None, samples: Samples | None = None
) -> Summary:
    """Judge rows, and write the page, its figure beside it (SVG and CSV), and to `claims` what it says as JSON.

    Parameters
    ----------
    rows : sequence of Row
    context : Context
    out, claims : Path
    samples : Samples, optional
        What the rows were made of, as in `judged`.

    Raises
    ------
    UserError
        As in `judged`.
    """
    report, summary = judged(rows, context, samples)
    answered = {answered for line in summary.rows for answered in _answered(line)}
    found = trust(context.registry, answered, _repeats(summary, samples or {}))
    text = markdown.render("page.md.j2", **page(report, summary, found))
    numbers = table(found["power"]["curve"] if found["power"] else [])
    with atomic(out.with_name(f"{FIGURE}.csv")) as temporary:
        numbers.write_csv(temporary)
    with atomic(out.with_name(f"{FIGURE}.svg")) as temporary:
        save(draw(numbers), temporary)
    if claims:
        write_json(claims, summary.told())
    write_text(out, text)
    return summary


def _answered(line: Line) -> Iterator[tuple[float, int]]:
    """The share of needles that the row's baseline found, and how many there were."""
    if measure := line.baseline.get(NEEDLES):
        yield measure.value, measure.n


def _repeats(summary: Summary, samples: Samples) -> Iterator[tuple[str, Repeat]]:
    """Every metric of every baseline that is told and was scored twice, with its `row_id`."""
    for line in summary.rows:
        if line.mechanism == BASELINE and line.metrics and (line.run, line.row_id) in samples:
            yield from ((line.row_id, repeat) for repeat in samples[line.run, line.row_id].repeats)


# ----------------------------------------------------------------------------------------- the page


def page(report: Report, summary: Summary, found: dict[str, Any]) -> dict[str, Any]:
    """Everything that the template names, as text ready to print."""
    measured = [line for line in summary.rows if line.measured]
    return {
        "claimed": ", ".join(tier for tier in TIERS if any(line.claimed == tier for line in measured)),
        "best_tier": CERTIFIED,
        "counts": [count_line(tier, count, summary) for tier, count in summary.counts.items() if count],
        "unjudged": sum(line.earned is None for line in summary.rows),
        "rows": len(summary.rows),
        "confidence": fmt.percent(CONFIDENCE),
        "best": [best_line(best, summary) for best in summary.best],
        "places": [place(list(lines)) for _, lines in groupby(measured, key=lambda line: line.place)],
        "missing": [line for line in summary.rows if not line.measured],
        "details": [detail(line, report) for line in measured],
        "trust": trust_context(found),
        "registry": report.registry,
        "current": report.current,
        "criteria": [criterion_line(criterion) for criterion in CRITERIA],
        "figure": f"{FIGURE}.svg",
    }


def count_line(tier: str, count: int, summary: Summary) -> dict[str, Any]:
    """How many rows earned a tier, and how many of them are measured and compress."""
    compressed = sum(line.compresses for line in summary.rows if line.earned == tier)
    return {"tier": tier, "rows": count, "compressed": compressed}


def best_line(best: Best, summary: Summary) -> dict[str, str]:
    """The best certified row of an engine and protocol by one measure, or that there is none, or no single one."""
    line = next((line for line in summary.rows if line.row_id == best.row_id and best.row_id), None)
    return {
        "model": best.model,
        "engine": best.engine,
        "protocol": best.protocol,
        "by": TITLES[best.by],
        "row": named(line) if line else _no_best(best, summary),
        "among": f"{best.certified} of {best.tried}",
        "bits": fmt.number(line and line.bits_per_value),
        "throughput": fmt.number(line and line.throughput_tok_s),
        "ratio": ratio(line and line.throughput_ratio),
    }


def _no_best(best: Best, summary: Summary) -> str:
    tied = [named(line) for line in summary.rows if line.row_id in best.tied and line.engine == best.engine]
    return f"not told apart: {', '.join(tied)}" if tied else "none is certified"


def ratio(found: Ratio | None) -> str:
    """A ratio, with its interval where it has one."""
    if found is None or found.low is None:
        return fmt.number(found and found.value)
    return fmt.estimate(found.model_dump()).replace(", ", f",{NO_BREAK}")


def named(line: Line) -> str:
    """A row's mechanism, with the bits that were asked for."""
    return line.name + (f" at {line.bits} bits" if line.bits else "")


def place(lines: list[Line]) -> dict[str, Any]:
    """One engine's table, and what stands under it."""
    first = lines[0]
    return {
        "model": first.model,
        "engine": first.engine,
        "on": on_what(first),
        "n": {metric: span(line.metrics[metric].n for line in lines if metric in line.metrics) for metric in METRICS},
        "lines": [table_line(line) for line in lines],
    }


def on_what(line: Line) -> str:
    """What was measured on: device, dtype and context."""
    said = (line.device, line.dtype, f"{line.context_tokens} tokens of context" if line.context_tokens else None)
    return ", ".join(filter(None, said))


def span(counts: Iterator[int]) -> str | None:
    """How many items; None where there are none."""
    counts = list(counts)
    return fmt.span(counts) if counts else None


def table_line(line: Line) -> dict[str, Any]:
    """The cells of one row; the baseline's quality is that of a second run, held against the first."""
    return {
        "name": line.name,
        "label": " ".join(filter(None, (line.mechanism_variant or line.mechanism, line.bits and str(line.bits)))),
        "bits": fmt.number(line.bits),
        "stored": fmt.number(line.bits_per_value),
        "throughput": fmt.number(line.throughput_tok_s),
        "ratio": ratio(line.throughput_ratio),
        "protocol": line.protocol,
        "span": line.stored_span,
        "metrics": [short(metric, line.metrics.get(metric)) for metric in METRICS],
        "earned": line.earned,
        "certified": line.earned == CERTIFIED,
        "why": line.why,
    }


def short(metric: str, measure: Measure | None) -> str:
    """A value with its interval, which stays on one line; without an interval where it has no width."""
    scale = PER_CENT if metric in RATES else 1.0
    return fmt.estimate(measure and measure.model_dump(), scale).replace(", ", f",{NO_BREAK}")


# -------------------------------------------------------------------------------- what a claim rests on


def detail(line: Line, report: Report) -> dict[str, Any]:
    """Everything that the gate found of one row."""
    claim = next(c for c in report.claims if (c.row["run"], c.row["row_id"]) == (line.run, line.row_id))
    return {
        "row_id": line.row_id,
        "earned": line.earned or line.badge,
        "badge": line.badge,
        "reasons": list(reason_lines(claim)),
        "judgements": [judgement_line(judgement) for judgement in claim.judgements],
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
        "allowed": fmt.number(judgement.tolerance),
        "room": fmt.number(judgement.margin),
        "word": judgement.word,
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
        "cap": fmt.percent(power["cap"]),
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


def criterion_line(criterion) -> dict[str, str]:
    """One criterion as the page lists it."""
    return {
        "name": criterion.name,
        "published": "yes" if criterion.name in PUBLISHED else "no",
        "ceiling": criterion.ceiling,
        "hard": "yes" if criterion.hard else "no",
        "why": criterion.why,
    }
