"""GATE.md: which codec may be claimed, then every row with what it earns; GATE-reasons.md beside it says why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from kvlab.core.records import write_json, write_text
from kvlab.gate.cases import Context
from kvlab.gate.catalogue.columns import TIERS, TOO_LOSSY
from kvlab.gate.catalogue.rows import Row
from kvlab.gate.evidence import Measure
from kvlab.gate.evidence.measures import CONFIDENCE, FEWEST
from kvlab.gate.render import p_value
from kvlab.gate.replay import NOT_REPLAYED, Replayer
from kvlab.output import format as fmt
from kvlab.output import markdown
from kvlab_pipeline.gate_page import ways
from kvlab_pipeline.gate_page.reasons import reasons
from kvlab_pipeline.gate_page.recommendation import Recommendation
from kvlab_pipeline.gate_page.row_summary import BASELINE, BEST_TIER, RowSummary
from kvlab_pipeline.gate_page.samples import Samples
from kvlab_pipeline.gate_page.summary import GateSummary, judged
from kvlab_pipeline.gate_page.written_table import WORDS, written_table

TEMPLATE, REASONS = (Path(__file__).parent / "templates" / f"{name}.md.j2" for name in ("page", "reasons"))
TRUST = "TRUST.md"
"""Written beside it by `kvlab step gate_trust`."""
NO_BREAK = "\N{NO-BREAK SPACE}"
PER_CENT = 100.0
NEEDLES = "needle_recall"
RATES = ("top1_agreement", NEEDLES)
RANGES = {"kl": (0.0, math.inf)} | dict.fromkeys(RATES, (0.0, 1.0))
METRICS = ("kl", "delta_nll", *RATES)
WORDS_OF = {"kl": "KL", "delta_nll": "change of the loss", "top1_agreement": "same top token", NEEDLES: "needles found"}
WORDS_OF |= WORDS


def write(
    rows: Sequence[Row],
    context: Context,
    out: Path,
    claims: Path | None = None,
    samples: Samples | None = None,
    disclosures: Mapping[str, str] | None = None,
    replayer: Replayer | None = None,
) -> GateSummary:
    """Judge rows, and write the page, and to `claims` what it says as JSON.

    Beside the page lie its reasons (``GATE-reasons.md`` of ``GATE.md``).

    Parameters
    ----------
    rows : sequence of Row
    context : Context
    out, claims : Path
    samples : Samples, optional
        What the rows were made of, as in `judged`.
    disclosures : mapping of str to str, optional
        What has to be told with every number of a model, by model.
    replayer : Replayer, optional
        As in `judged`.

    Raises
    ------
    UserError
        As in `judged`.
    """
    report, summary = judged(rows, context, samples, replayer)
    beside = reasons_of(out)
    told = {model: said for model, said in (disclosures or {}).items() if any(r.model == model for r in summary.rows)}
    text = markdown.render(TEMPLATE, **page(summary), reasons=beside.name, disclosures=told)
    why = markdown.render(REASONS, **reasons(report, summary), page=out.name, trust=TRUST, disclosures=told)
    if claims:
        write_json(claims, summary.to_json())
    write_text(beside, why)
    write_text(out, text)
    return summary


def reasons_of(out: Path) -> Path:
    """Where the reasons of a page lie."""
    return out.with_name(f"{out.stem}-reasons{out.suffix}")


# ----------------------------------------------------------------------------------------- the page


def page(summary: GateSummary) -> dict[str, Any]:
    """Everything that the template of the page names, as text ready to print."""
    measured = [line for line in summary.rows if line.measured]
    return {
        "claimed": ", ".join(tier for tier in TIERS if any(line.claimed == tier for line in measured)),
        "best_tier": BEST_TIER,
        "fewest": FEWEST,
        "not_replayed": NOT_REPLAYED,
        "trust": TRUST,
        "too_lossy": TOO_LOSSY,
        "tested": summary.tested,
        "alpha": fmt.percent(summary.alpha, 1),
        "answers": [answer_line(answer, summary) for answer in summary.answers],
        "whole": any(answer.whole for answer in summary.answers),
        "certified": any(answer.word == "certified" for answer in summary.answers),
        "counts": [count_line(tier, count, summary) for tier, count in summary.counts.items() if count],
        "unjudged": sum(line.earned is None for line in summary.rows),
        "rows": len(summary.rows),
        "confidence": fmt.percent(CONFIDENCE),
        "again": [line for line in summary.rows if line.replay],
        "places": [place(lines) for lines in apart(measured)],
        "missing": [line for line in summary.rows if not line.measured],
    }


def answer_line(answer: Recommendation, summary: GateSummary) -> dict[str, Any]:
    """What may be claimed of one group of rows, at which bytes and quality."""
    line = next((line for line in summary.rows if line.row_id == answer.row_id and answer.row_id), None)
    plain = next((one for one in summary.rows if line and one.mechanism == BASELINE and one.place == line.place), None)
    found = {metric: short(metric, line and line.metrics.get(metric)) for metric in METRICS}
    return answer.model_dump() | {
        "row": line and named(line),
        "bits": fmt.number(line and line.bits_per_value),
        "of": fmt.number(plain and plain.bits_per_value),
        "kl": found["kl"],
        "top": found["top1_agreement"],
        "adjusted_p": p_value(line and line.adjusted_p),
        "why": _not_yet(line, summary) if line else "",
    }


def _not_yet(line: RowSummary, summary: GateSummary) -> str:
    """Why a preview is no more: which metrics are open, or how many rows were tested beside it."""
    if line.open:
        return f"{', '.join(WORDS_OF.get(name, name) for name in line.open)} open"
    return f"not sure enough as one of {summary.tested} rows tested"


def count_line(tier: str, count: int, summary: GateSummary) -> dict[str, Any]:
    """How many rows earned a tier, and how many of them are measured and compress."""
    compressed = sum(line.compresses for line in summary.rows if line.earned == tier)
    return {"tier": tier, "rows": count, "compressed": compressed}


def named(line: RowSummary) -> str:
    """A row's mechanism, with the bits that were asked for."""
    return line.name + (f" at {line.bits} bits" if line.bits else "")


def apart(measured: Iterable[RowSummary]) -> Iterator[list[RowSummary]]:
    """The lines of each engine and way of coding, after that of the engine as it is."""
    for _, lines in groupby(measured, key=lambda line: line.place):
        plain, coded = [], {}
        for line in lines:
            if line.mechanism == BASELINE:
                plain.append(line)
            else:
                coded.setdefault((line.protocol, line.stored_span), []).append(line)
        for way in sorted(coded, key=ways.order):
            yield plain + coded[way]
        if not coded:
            yield plain


def place(lines: list[RowSummary]) -> dict[str, Any]:
    """One engine's table of one way of coding, and what stands under it."""
    first, coded = lines[0], [line for line in lines if line.mechanism != BASELINE]
    way = lines[-1].protocol, lines[-1].stored_span
    context = f"{first.context_tokens} tokens of context" if first.context_tokens else None
    return {
        "title": ways.title(way, first.engine or "") if coded else "The engine as it is",
        "note": ways.NOTES.get(way) if coded else None,
        "model": first.model,
        "engine": first.engine,
        "on": ", ".join(filter(None, (first.device, first.dtype, context))),
        "n": {metric: span(line.metrics[metric].n for line in lines if metric in line.metrics) for metric in METRICS},
        "lines": [table_line(line) for line in lines],
        "written": written_table(lines) if written_table(coded) else None,
    }


def span(counts: Iterator[int]) -> str | None:
    """How many items; None where there are none."""
    counts = list(counts)
    return fmt.span(counts) if counts else None


def table_line(line: RowSummary) -> dict[str, Any]:
    """The cells of one row; the baseline's quality is that of a second run, held against the first."""
    return {
        "name": line.name,
        "label": " ".join(filter(None, (line.mechanism_variant or line.mechanism, line.bits and str(line.bits)))),
        "coded": line.protocol if line.mechanism != BASELINE else None,
        "bits": fmt.number(line.bits),
        "stored": fmt.number(line.bits_per_value),
        "throughput": fmt.number(line.throughput_tok_s),
        "ratio": fmt.estimate(line.throughput_ratio).replace(", ", f",{NO_BREAK}"),
        "capacity": fmt.number(line.capacity_ratio),
        "protocol": line.protocol,
        "span": line.stored_span,
        "metrics": [short(metric, line.metrics.get(metric)) for metric in METRICS],
        "adjusted_p": p_value(line.adjusted_p),
        "earned": line.earned,
        "certified": line.certified,
        "why": line.why,
    }


def short(metric: str, measure: Measure | None) -> str:
    """A value with its interval, on one line and cut to what it can be; without one where it has no width."""
    if measure is None:
        return fmt.estimate(None)
    least, most = RANGES.get(metric, (-math.inf, math.inf))
    cut = {end: min(max(getattr(measure, end), least), most) for end in ("low", "high")}
    scale = PER_CENT if metric in RATES else 1.0
    return fmt.estimate(measure.model_dump() | cut, scale).replace(", ", f",{NO_BREAK}")
