"""TRUST.md: what the gate says of corruptions, of baselines against themselves and of losses, all of them planted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvlab.core.records import atomic, write_text
from kvlab.gate.cases import Context
from kvlab.gate.catalogue.rows import Row
from kvlab.output import format as fmt
from kvlab.output import markdown
from kvlab_pipeline.gate_page.page import NEEDLES
from kvlab_pipeline.gate_page.row_summary import BASELINE
from kvlab_pipeline.gate_page.samples import Repeat, Samples, read
from kvlab_pipeline.gate_page.summary import GateSummary, judged
from validation.gate.detection import picture, table
from validation.gate.power import WORDS
from validation.gate.trust import trust

TEMPLATE = Path(__file__).parent / "templates" / "trust.md.j2"
PAGE, FIGURE = "GATE.md", "detection"


def write(rows: Sequence[Row], context: Context, out: Path, records: Sequence[Path] = ()) -> None:
    """Write the page, and beside it the curve of planted losses as SVG and CSV.

    Parameters
    ----------
    rows : sequence of Row
        Their baselines are tried too: as often as these answered, on as many items.
    context : Context
    out : Path
    records : sequence of Path
        What `kvlab step mechanisms` wrote, of which the rows were made: baselines that were scored twice.
    """
    samples = read(records)
    _, summary = judged(rows, context, samples)
    asked = [line.baseline[NEEDLES] for line in summary.rows if NEEDLES in line.baseline]
    answered = {(measure.value, measure.n) for measure in asked}
    found = trust(context.registry, answered, _repeats(summary, samples))
    numbers = table(found["power"]["curve"] if found["power"] else [])
    with atomic(out.with_name(f"{FIGURE}.csv")) as temporary:
        numbers.write_csv(temporary)
    with atomic(out.with_name(f"{FIGURE}.svg")) as temporary:
        picture(numbers, temporary)
    write_text(out, markdown.render(TEMPLATE, **page(found), page=PAGE, figure=f"{FIGURE}.svg"))


def _repeats(summary: GateSummary, samples: Samples) -> Iterator[tuple[str, Repeat]]:
    """Every metric of every baseline that is told and was scored twice, with its `row_id`."""
    for line in summary.rows:
        if line.mechanism == BASELINE and line.metrics and (line.run, line.row_id) in samples:
            yield from ((line.row_id, repeat) for repeat in samples[line.run, line.row_id].repeats)


def page(found: dict[str, Any]) -> dict[str, Any]:
    """Everything that the template names but its links, as text."""
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
