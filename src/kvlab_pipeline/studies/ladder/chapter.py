"""The codecs beside one another in the report: which to use at how many bits, and what each costs."""

from __future__ import annotations

import polars as pl

from kvlab.core.errors import MissingResult
from kvlab.output import format as fmt
from kvlab_pipeline.rendering import marks
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
from kvlab_pipeline.studies.ladder.numbers import ladder_entries, rungs_of
from kvlab_pipeline.studies.ladder.record import read_facts
from kvlab_pipeline.studies.ladder.state import gain_entries, refuse_other, state_entries
from kvlab_pipeline.studies.ladder.tables import TEXTS, context, plain_rows
from kvlab_pipeline.studies.tidy import (
    BITS,
    BYTES,
    COUNT,
    DECIBELS,
    NATS,
    RATIO,
    SHARE,
    TOKENS,
    Compared,
    Estimand,
    Level,
    Several,
)

TEXT = {"text": Level("test is held out of the text that calibrates, other is of another domain")}
# One codec at one setting on one text, over every layer's K and V, in float32.
LADDER = Several(
    TEXT
    | {
        "label": Level(),
        "codec": Level("the family: rungs of one codec are no rivals of each other"),
        "whole": Level("whether it codes finished caches alone: it is held against all, and is no rival of others"),
        "protocol": Level(),
        "span": Level(),
        "cell_id": Level(),
        "recipe_id": Level(),
        "calibrated": Level("whether the codec reads anything that was fitted to text"),
        "bits_per_value": Estimand(
            BITS, "every byte written for the context, also for tokens that a recipe keeps as they are; no calibration"
        ),
        "kl": Estimand(NATS),
        "top1_agreement": Estimand(SHARE),
        # Of the scored tokens that lie from `first` to `last` tokens after the end of the context.
        "by_offset": Several({"first": Level(), "last": Level(), "kl": Estimand(NATS)}),
        "rival": Level(
            "the rung of another codec with the least KL among those that store no more, or, of one that is whole, that"
            " fit the same half bit; null where there is none"
        ),
        "difference": Estimand(NATS, "KL minus the rival's, on the same tokens"),
        "compared": Compared(),
    }
)
# Which rung to use on one text at up to so many bits per value.
ANSWERS = Several(
    TEXT
    | {
        "whole": Level("of all rungs, for a cache that is kept; else of those that a model can run with"),
        "at_most": Level("bits per value"),
        "label": Level(),
        "bits_per_value": Estimand(BITS),
        "kl": Estimand(NATS),
        "tried": Estimand(COUNT, "rungs that store no more than at_most"),
        "ties": Level("those whose KL is not told from its: intervals of all differences hold together"),
    }
)
# `klt` with a part taken out, on one text, on the windows that it and its counterpart both score.
ABLATION = Several(
    TEXT
    | {
        "label": Level(),
        "against": Level(),
        "cell_id": Level(),
        "bits_per_value": Estimand(BITS),
        "kl": Estimand(NATS),
        "difference": Estimand(NATS, "KL minus that of against"),
        "times": Estimand(RATIO, "KL over that of against"),
        "compared": Compared(),
    }
)
# What a rung's cache takes with its calibration and its exact tokens.
STATE = Several(
    {
        "label": Level(),
        "recipe_id": Level(),
        "text": Level("on which it is set beside instead"),
        "rate": Estimand(BITS, "of a coded token"),
        "exact_tokens": Estimand(
            TOKENS,
            "kept in 16 bits: the recipe's, and under snapshot those between context and scored token",
        ),
        "whole_bytes": Estimand(BYTES, "the whole calibration as a file"),
        "decoder_bytes": Estimand(BYTES, "the part of it that decodes"),
        "resident_bytes": Estimand(BYTES, "what its codecs hold in memory, which at counts"),
        "at": Several({"tokens": Level(), "bits_per_value": Estimand(BITS, "of a whole cache of so many tokens")}),
        "even_with_bfloat16": Estimand(TOKENS, "from which on it stores no more than 16 bits a value; null for never"),
        "instead": Level(
            "of a calibrated rung: of those without calibration and no more KL the one that stores least; null for none"
        ),
        "even_with_instead": Estimand(TOKENS, "from which on it stores no more than that one"),
    }
)
# Coding gain of K or of V, the mean over layers and KV heads; 6.02 dB are one bit per value.
GAIN = Several(
    TEXT
    | {
        "stream": Level(),
        "tokens": Level("all; later leaves the first token of each window out, where attention sinks are"),
        "over_even": Estimand(DECIBELS, "over as many bits for every dimension of the metric's own frame"),
        "over_plain": Estimand(DECIBELS, "over as many bits for every dimension of the values as they are"),
        "fitted_over_even": Estimand(DECIBELS, "the same by the calibration's own moments, all tokens"),
        "fitted_over_plain": Estimand(DECIBELS),
    }
)
# A codec at a longer context, or `klt` fitted on a part of the calibration, on one text.
FURTHER = Several(
    {"what": Level("growth or context")}
    | TEXT
    | {
        "label": Level(),
        "context": Level(),
        "calibration_tokens": Level(),
        "bits_per_value": Estimand(BITS),
        "kl": Estimand(NATS),
        "top1_agreement": Estimand(SHARE),
        "against": Level(
            "growth: the same codec with the whole calibration; context: the first codec there; null for that one"
        ),
        "times": Estimand(RATIO, "KL over that of against, on the same tokens"),
    }
)


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


CHAPTER = Chapter(
    parts={
        "ladder": LADDER,
        "ladder_answers": ANSWERS,
        "ladder_ablation": ABLATION,
        "ladder_state": STATE,
        "ladder_gain": GAIN,
        "ladder_further": FURTHER,
    },
    entries=entries,
    sections={"ladder": PageSection(5, "Which codec to use at how many bits", asks="codecs beside one another")},
    context=context,
    claims=claims,
    figures={"ladder": Drawn(ladder_table, ladder)},
    limits=lambda metrics: [("codecs beside one another, KL", estimates_of(metrics, "ladder", "difference"))],
)
