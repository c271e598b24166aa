"""The codecs beside one another in the report: which to use at how many bits, and what each costs."""

from __future__ import annotations

import math
from itertools import groupby

import polars as pl

from kvlab.core.errors import MissingResult
from kvlab.output import format as fmt
from kvlab.output.markdown import code
from kvlab.output.rendering import listing
from kvlab_pipeline.rendering import marks, tables
from kvlab_pipeline.rendering.basis import Basis
from kvlab_pipeline.rendering.figure import (
    DOWN,
    GREY,
    INK,
    OTHER,
    UP,
    Axis,
    Figure,
    LegendKey,
    Line,
    Look,
    Panel,
    log_axis,
    shape_of,
)
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.studies.chapter import Chapter, ChapterInputs, Drawn, PageSection, estimates_of
from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.ladder.beyond import further_entries
from kvlab_pipeline.studies.ladder.numbers import PARTS, ladder_entries, rungs_of
from kvlab_pipeline.studies.ladder.record import read_facts
from kvlab_pipeline.studies.ladder.state import gain_entries, refuse_other, state_entries

# What every codec costs at the bits that it stores.

COLOURS = (UP, DOWN, OTHER, INK, GREY)


def ladder_table(metrics: dict) -> pl.DataFrame | None:
    """One row per rung and text: bits per value and KL; `series` is the rung without its bits."""
    rows = [
        {"text": row["text"], "label": row["label"], "series": series_of(row["label"])}
        | {"bits_per_value": float(row["bits_per_value"]), "cell_id": row["cell_id"]}
        | marks.interval(row["kl"])
        for row in plain_rows(metrics)
    ]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else None


def series_of(label: str) -> str:
    """A rung's name without the bits at its end."""
    name, _, bits = label.rpartition(" ")
    return name if bits.replace(".", "", 1).isdigit() else label


def ladder(table: pl.DataFrame) -> Figure:
    """KL, logarithmic, over bits per value: a panel per text, a line per codec."""
    lines = marks.numbered(table)
    texts, series = marks.each(lines, "text", "series")
    bits = table["bits_per_value"]
    places = Axis(
        (max(0.0, bits.min() - 0.4), bits.max() + 0.4), "bits per value, all that is written for coded tokens"
    )
    values = log_axis(lines, f"KL, {KL_UNIT} (logarithmic)")
    panels = tuple(panel([line for line in lines if line["text"] == text], series, places, values) for text in texts)
    return Figure(
        "What every codec costs at the bits that it stores",
        "Left and down is better. A line joins the settings of one codec. The calibration and the tokens after"
        " the context come on top, see the table of bits at so many tokens. An arrow at the lower end stands for a"
        " value that is not above zero.",
        panels,
        columns=2,
        keys=tuple(LegendKey(one, look(series, one), Line((), (), look(series, one).colour, 1.0)) for one in series),
        height=260,
    )


def panel(lines: list[dict], series: list[str], places: Axis, values: Axis) -> Panel:
    """One text."""
    drawn = tuple(marks.mark(line, line["bits_per_value"], words(line), look(series, line["series"])) for line in lines)
    return Panel(places, values, drawn, tuple(curves(lines, series)), title=TEXTS[lines[0]["text"]])


def curves(lines: list[dict], series: list[str]) -> list[Line]:
    """A line through each codec's rungs, by their bits."""
    found = []
    for one in series:
        mine = sorted(
            (line for line in lines if line["series"] == one and line["value"] > 0),
            key=lambda line: line["bits_per_value"],
        )
        if len(mine) > 1:
            points = (tuple(line[key] for line in mine) for key in ("bits_per_value", "value"))
            found.append(Line(*points, look(series, one).colour, 1.0))
    return found


def look(series: list[str], one: str) -> Look:
    """Colour and shape of a codec; the two go round at different paces, so that twenty can be told apart."""
    order = series.index(one)
    return Look(COLOURS[order % len(COLOURS)], shape_of(order))


def words(line: dict) -> list[str]:
    """What a rung's mark says."""
    return [
        line["label"],
        TEXTS[line["text"]],
        marks.quantity("KL", line),
        f"{fmt.number(line['bits_per_value'])} bits per value",
        marks.basis(line),
        f"cell {line['cell_id']}",
    ]


# Each rung beside the best of another codec that stores no more, and `klt` less a part beside the whole.


def claims(metrics: dict) -> list[dict]:
    """One claim for each rung over the coded clean cache that has a rival, and for each part that is taken out."""
    rows = [row for row in plain_rows(metrics) if row["difference"]]
    ablated = metrics.get("ladder_ablation") or []
    return [
        *(claim("ladder", subject(row, row["rival"]), row["difference"], row["compared"]) for row in rows),
        *(claim("ladder", subject(row, row["against"]), row["difference"], row["compared"]) for row in ablated),
    ]


def subject(row: dict, other: str) -> str:
    """A rung in place of another, and on which text."""
    return f"`{row['label']}` in place of `{other}` ({TEXTS[row['text']]})"


def entries(measured: ChapterInputs) -> dict[str, list[dict]]:
    """Its parts of ``metrics.json``; `MissingResult` where nothing weighed the calibrations."""
    params, boot = measured.params, measured.boot
    if measured.sources.ladder is None:
        raise MissingResult(
            "the ladder's calibrations are not weighed; run `kvlab step ladder`, and name it with --ladder",
            code="missing-result.no-facts",
        )
    facts, rungs = read_facts(measured.sources.ladder), rungs_of(params, measured.results)
    refuse_other(facts, measured.results)
    return ladder_entries(boot, rungs) | {
        "ladder_further": further_entries(params, measured.sources.further, measured.results, boot),
        "ladder_state": state_entries(params, facts, rungs),
        "ladder_gain": gain_entries(params, facts, boot, measured.results.select("ladder")[0].documents),
    }


# ---------------------------------------------------------------------------------------------- tables

TEXTS = {"test": "text held out of the calibration's", "other": "text of another domain"}
PLAIN = ("snapshot", "context")
FORWARD = (PLAIN, ("in_forward", "context"), ("in_forward", "window"))
TOLD = (8192, 131072)  # tokens of a cache whose bits stand beside a rung's own
DECIBELS = 20 * math.log10(2)  # of one bit per value


def plain_rows(metrics: dict) -> list[dict]:
    """The rungs over the coded clean cache, which all codecs have."""
    return [row for row in metrics.get("ladder") or [] if (row["protocol"], row["span"]) == PLAIN]


def named(text: str, metrics: dict) -> str:
    """A text by its name in params.yaml, and what it is."""
    corpus = (metrics.get("settings") or {}).get("corpus") or {}
    name = corpus.get("other" if text == "other" else "source")
    return f"{code(name)}, {TEXTS[text]}" if name else TEXTS[text]


def model(metrics: dict) -> str:
    """The model by the name of its results."""
    slug = (metrics.get("identity") or {}).get("slug")
    return f"`{slug}`" if slug else "this model"


def context(metrics: dict, basis: Basis) -> dict:
    """What ``ladder.md.j2`` names."""
    rows = plain_rows(metrics)
    if not rows:
        return {"ladder": None}
    answers = metrics.get("ladder_answers") or []
    use, keep = ([row for row in answers if row["whole"] == whole] for whole in (False, True))
    whole = dict.fromkeys(code(row["codec"]) for row in rows if row["whole"])
    return {
        "ladder": {
            "use": [sentence(limits, found, metrics) for limits, found in by_limits(use)],
            "keep": [sentence(limits, found, metrics) for limits, found in by_limits(keep)],
            "whole": listing(whole) if whole else None,
            "tried": fmt.span(row["tried"] for row in answers) if answers else None,
            "gain": gain_sentence(metrics),
            "ablations": ablations(metrics),
            "forward": forward(metrics),
            "growth": further(metrics, "growth"),
            "contexts": further(metrics, "context"),
            "gains": gains(metrics) if metrics.get("ladder_gain") else None,
            "state": states(metrics["ladder_state"]) if metrics.get("ladder_state") else None,
            "groups": [
                {"text": named(text, metrics), "table": table(list(found)), "offsets": offsets(list(found))}
                for text, found in by_text(rows)
            ],
            "basis": basis([row["kl"] for row in rows]),
        }
    }


def by_text(rows: list[dict]) -> list[tuple[str, list[dict]]]:
    """Rows by their text, in the order given."""
    return [(text, [row for row in rows if row["text"] == text]) for text in dict.fromkeys(row["text"] for row in rows)]


def by_limits(answers: list[dict]) -> list[tuple[list[float], list[dict]]]:
    """Answers with how many bits they may take, fewest first; limits with the same rungs are together.

    Ties are those at the widest of these limits, where most rungs were tried.
    """
    together: list[tuple[list[float], list[dict]]] = []
    ordered = sorted(answers, key=lambda row: row["at_most"])
    for limit, rows in groupby(ordered, key=lambda row: row["at_most"]):
        found, limits = list(rows), [limit]
        if together and picked(found) == picked(together[-1][1]):
            limits = together.pop()[0] + limits
        together.append((limits, found))
    return together


def picked(answers: list[dict]) -> list[tuple[str, str]]:
    """The rung that is to be used on each text."""
    return [(row["text"], row["label"]) for row in answers]


def sentence(limits: list[float], answers: list[dict], metrics: dict) -> str:
    """What to use on this model at up to so many bits; text by text where the texts do not agree."""
    wholes = whole_bits(metrics)
    head = f"On {model(metrics)}, at up to {listing(map(fmt.plain, limits), 'or')} bits per value"
    if len({row["label"] for row in answers}) == 1:
        first = answers[0]
        costs = listing([f"{fmt.estimate(row['kl'])} on {TEXTS[row['text']]}" for row in answers])
        open_ = "; ".join(f"on {TEXTS[row['text']]} {untold(row)}" for row in answers if row["ties"])
        told = f" ({open_})" if open_ else ""
        return f"{head}, use **{first['label']}**: {stored(first, wholes)}, KL {costs}{told}."
    each = [
        f"on {TEXTS[row['text']]} use **{row['label']}** ({stored(row, wholes)},"
        f" KL {fmt.estimate(row['kl'])}{'; ' + untold(row) if row['ties'] else ''})"
        for row in answers
    ]
    return f"{head}, {', and '.join(each)}."


def whole_bits(metrics: dict) -> dict[str, dict[int, float]]:
    """Bits per value by rung and tokens of a cache, calibration and exact tokens counted."""
    return {
        row["label"]: {at["tokens"]: at["bits_per_value"] for at in row["at"]}
        for row in metrics.get("ladder_state") or []
    }


def stored(row: dict, wholes: dict[str, dict[int, float]]) -> str:
    """The bits of a rung, and those of whole caches beside them."""
    own, at = f"{fmt.number(row['bits_per_value'])} bits", wholes.get(row["label"])
    if not at:
        return own
    told = listing([f"{fmt.number(at[tokens])} in all at {length(tokens)}" for tokens in TOLD])
    return f"{own} ({told})"


def length(tokens: int) -> str:
    """So many tokens in words."""
    return f"{tokens // 1024} k tokens"


def untold(row: dict) -> str:
    """The rungs that may be as good."""
    return f"not told from {listing([f'`{label}`' for label in row['ties']])}"


def table(rows: list[dict]) -> str:
    """Every rung on one text, fewest bits first."""
    columns = {
        "rung": tables.code("label"),
        "calibrated": lambda row: "yes" if row["calibrated"] else "no",
        "bits per value": tables.number("bits_per_value"),
        f"KL, {KL_UNIT}": tables.estimate("kl"),
        "same top token, %": tables.percent("top1_agreement"),
        "best rival at no more bits": tables.code("rival"),
        f"minus the rival, {KL_UNIT}": tables.estimate("difference", signed=True),
        "reading": tables.effect("difference"),
    }
    return tables.table(fewest_first(rows), columns)


def fewest_first(rows: list[dict]) -> list[dict]:
    """Rungs by their bits, of equal ones the better first."""
    return sorted(rows, key=lambda row: (row["bits_per_value"], row["kl"]["value"]))


def offsets(rows: list[dict]) -> str | None:
    """KL by how far after the coded context a token lies, every rung on one text."""
    bins = list(dict.fromkeys((one["first"], one["last"]) for row in rows for one in row["by_offset"]))
    if len(bins) < 2:
        return None
    lines = []
    for row in sorted(rows, key=lambda row: (row["bits_per_value"], row["kl"]["value"])):
        found = {(one["first"], one["last"]): one["kl"] for one in row["by_offset"]}
        lines.append([f"`{row['label']}`", *(fmt.estimate(found.get(one)) for one in bins)])
    return fmt.table(["rung", *(f"{first} to {last}" for first, last in bins)], lines)


def states(rows: list[dict]) -> str:
    """Bits of whole caches, fewest at the longest first."""
    columns = {
        "rung": tables.code("label"),
        "bits of a coded value": tables.number("rate"),
        "bytes of tables in memory": lambda row: fmt.number(row["resident_bytes"] or None),
        "exact tokens": tables.plain("exact_tokens"),
    }
    for at, one in enumerate(rows[0]["at"]):
        columns[f"bits at {length(one['tokens'])}"] = lambda row, at=at: fmt.number(row["at"][at]["bits_per_value"])
    columns |= {
        "beats bfloat16 from": lambda row: tokens_from(row["even_with_bfloat16"]),
        "no worse without calibration": tables.code("instead"),
        "beats it from": lambda row: tokens_from(row["even_with_instead"]) if row["instead"] else fmt.DASH,
    }
    return tables.table(sorted(rows, key=lambda row: row["at"][-1]["bits_per_value"]), columns)


def tokens_from(even: float | None) -> str:
    """From how many tokens on."""
    return "never" if even is None else f"{math.ceil(even)} tokens" if even else "the first token"


def gain_sentence(metrics: dict) -> str | None:
    """How much any transform can gain on this model, on the text that the calibration does not know best."""
    rows = [row for row in metrics.get("ladder_gain") or [] if row["tokens"] == "later"]
    if not rows:
        return None
    text = "other" if any(row["text"] == "other" for row in rows) else rows[0]["text"]
    told = [
        f"{fmt.estimate(row['over_even'])} dB of {row['stream'].upper()}"
        f" ({fmt.number(row['over_even']['value'] / DECIBELS, 2)} bits per value)"
        for row in rows
        if row["text"] == text
    ]
    return (
        f"The coding gain on {model(metrics)}, which any calibrated transform has over equal bits, is {listing(told)}"
        f" on {TEXTS[text]}, the first token aside: what `klt` is beside codecs without a transform is a fact about"
        " this model."
    )


def gains(metrics: dict) -> str:
    """Coding gain by text, stream and tokens."""
    lines = [
        [
            named(row["text"], metrics),
            row["stream"].upper(),
            {"all": "all", "later": "all but the first"}[row["tokens"]],
            fmt.estimate(row["over_even"]),
            fmt.number(row["over_even"]["value"] / DECIBELS, 2),
            fmt.estimate(row["over_plain"]),
            fmt.number(row["over_plain"]["value"] / DECIBELS, 2),
            fmt.number(row["fitted_over_even"]),
        ]
        for row in metrics["ladder_gain"]
    ]
    headers = [
        "text",
        "stream",
        "tokens",
        "over equal bits in the metric, dB",
        "bits",
        "over equal bits on plain values, dB",
    ]
    return fmt.table([*headers, "bits", "by the calibration's own moments, dB"], lines)


def ablations(metrics: dict) -> str | None:
    """`klt` less each part, by text."""
    columns = {
        "rung": tables.code("label"),
        "text": lambda row: named(row["text"], metrics),
        "bits per value": tables.number("bits_per_value"),
        f"KL, {KL_UNIT}": tables.estimate("kl"),
        "held against": tables.code("against"),
        "KL over its": tables.estimate("times"),
        "minus it": tables.estimate("difference", signed=True),
        "reading": tables.effect("difference"),
    }
    return tables.table_if_any(metrics.get("ladder_ablation") or [], columns)


def forward(metrics: dict) -> str | None:
    """The rungs that are measured inside the one forward too, beside themselves over the clean cache, by text."""
    rows = metrics.get("ladder") or []
    inside = {(row["text"], row["label"]): row for row in rows if row["protocol"] == "in_forward"}
    lines = []
    for text, label in inside:
        found = {(row["protocol"], row["span"]): row for row in rows if (row["text"], row["label"]) == (text, label)}
        kls = [fmt.estimate(found[place]["kl"]) if place in found else fmt.DASH for place in FORWARD]
        lines.append([f"`{label}`", named(text, metrics), *kls])
    headers = ["rung", "text", "over the clean cache", "inside the forward, context", "inside, scored tokens too"]
    return fmt.table(headers, lines) if lines else None


def further(metrics: dict, what: str) -> str | None:
    """`klt` on parts of the calibration (``growth``), or codecs at longer contexts (``context``)."""
    size, key, other = {
        "growth": ("tokens of calibration", "calibration_tokens", "all of it"),
        "context": ("coded tokens", "context", "the first"),
    }[what]
    columns = {
        "rung": tables.code("label"),
        "text": lambda row: named(row["text"], metrics),
        size: tables.number(key),
        "bits per value": tables.number("bits_per_value"),
        f"KL, {KL_UNIT}": tables.estimate("kl"),
        "same top token, %": tables.percent("top1_agreement"),
        f"KL over that of {other}": tables.estimate("times"),
    }
    return tables.table_if_any([row for row in metrics.get("ladder_further") or [] if row["what"] == what], columns)


CHAPTER = Chapter(
    parts=PARTS,
    entries=entries,
    sections={"ladder": PageSection(5, "Which codec to use at how many bits", asks="codecs beside one another")},
    context=context,
    claims=claims,
    figures={"ladder": Drawn(ladder_table, ladder)},
    limits=lambda metrics: [("codecs beside one another, KL", estimates_of(metrics, "ladder", "difference"))],
)
