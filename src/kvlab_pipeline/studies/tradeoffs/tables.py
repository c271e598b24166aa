"""The tables of the study's REPORT.md, and its figure."""

from __future__ import annotations

import re

from kvlab.output.format import DASH, estimate, number
from kvlab_pipeline.rendering import tables as cols
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
    Mark,
    Panel,
    log_axis,
)
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.rendering.tables import Column, table_if_any
from kvlab_pipeline.studies.tradeoffs.record import ArmFound, TradeoffsRecord

KIB = 1024


def parts(record: TradeoffsRecord) -> dict[str, str | None]:
    """What the template places, by name."""
    columns: dict[str, Column] = {
        "kind": cols.text("family"),
        "setting": cols.code("name"),
        "bits per value": lambda one: number(8 * one.stored / record.values),
        "bytes stored per token": cols.number("stored"),
        "KiB read per step": lambda one: number(one.read / KIB),
        "KL": cols.estimate("kl"),
        "same top token, %": cols.percent("top1"),
        "needles found, %": cols.percent("found"),
        "tokens per second": cols.number("per_second"),
    }
    exact = {  # what there is without any arm
        "kind": "none",
        "setting": "16 bits",
        "bits per value": "16",
        "bytes stored per token": number(record.full),
        "KiB read per step": number(record.full_read / KIB),
        "KL": number(record.rounding.value),
        "needles found, %": estimate(record.exact_found, 100),
        "tokens per second": number(record.exact_per_second),
    }
    first = {
        name: lambda one, name=name, tell=tell: tell(one) if one else exact.get(name, DASH)
        for name, tell in columns.items()
    }
    return {
        "full_read": number(record.full_read / KIB),
        "costs": table_if_any([None, *record.arms], first),
        "against": table_if_any(
            [one for one in record.arms if one.against is not None],
            {
                "kind": cols.text("family"),
                "setting": cols.code("name"),
                "bytes stored per token": cols.number("stored"),
                "held against": cols.code("rival"),
                "difference of KL": cols.estimate("against", signed=True),
            },
        ),
        "drafts": table_if_any(
            record.drafted,
            {
                "drafter": cols.code("name"),
                "tokens of a draft": cols.number("draft"),
                "accepted, %": cols.percent("accepted"),
                "tokens per call": cols.number("tokens_per_call"),
                "bytes stored per token": cols.number("stored"),
                "KiB read per written token": lambda one: (
                    f"{number(one.read(record.tokens) / KIB)} of {number(record.full_read / KIB)}"
                ),
                "tokens per second, and without, prefill included": lambda one: (
                    f"{number(one.per_second)} against {number(one.plain_per_second)}"
                ),
            },
        ),
    }


# The figure of the study: what each way to make a cache cheaper costs, over what it stores and over what it reads.

LOOKS = {  # of a family, one after the other for its kinds
    "eviction": (Look(GREY, "square"), Look(GREY, "square", open=True), Look(GREY, "plus")),
    "latent": (Look(OTHER, "triangle"),),
    "latent x codec": (Look(OTHER, "triangle", open=True),),
    "sparse reading": (Look(INK, "circle"), Look(INK, "plus"), Look(INK, "square")),
    "codec x sparse reading": (Look(INK, "circle", open=True),),
}
DRAFTED = Look(UP, "down")
CODECS = (Look(UP, "circle"), Look(DOWN, "diamond"), Look(DOWN, "diamond", open=True), Look(GREY, "diamond"))
NAMES = {"codec x sparse reading": "codec under sparse reading", "latent x codec": "latent, coded"}


def figure(record: TradeoffsRecord) -> Figure:
    """KL, logarithmic, over bytes stored and over bytes read; a line joins the widths of one codec."""
    values = log_axis([one.kl.to_json() for one in record.arms], f"KL, {KL_UNIT} (logarithmic)")
    stored = [(one.name, one.stored / KIB) for one in record.drafted]
    read = [(one.name, one.read(record.tokens) / KIB / record.tokens) for one in record.drafted]
    panels = (
        panel(record, "stored", KIB, "KiB stored for a token of the context", values, stored),
        panel(record, "read", KIB * record.tokens, "KiB read in a step, by token before it", values, read),
    )
    return Figure(
        f"What makes the cache of {record.model} cheaper, and what it costs",
        "Left and down is better, in both panels. An arrow at the lower end has no loss, by the rule of its check:"
        " what self-speculation costs is the bytes that it stores.",
        panels,
        columns=2,
        keys=tuple(keys(record)),
        height=330,
    )


def panel(
    record: TradeoffsRecord, what: str, scale: float, title: str, values: Axis, drafted: list[tuple[str, float]]
) -> Panel:
    """One axis of bytes: every arm and every drafter on it, and a line at 16 bits."""
    marks = [mark(record, place, one, getattr(one, what) / scale) for place, one in enumerate(record.arms)]
    for name, at in drafted:
        words = (f"self-speculation, {name} drafts", "what is written is what the exact cache writes")
        marks.append(Mark(len(marks), at, 0.0, 0.0, 0.0, words, DRAFTED))
    full = record.full / KIB
    places = Axis((0.0, 1.05 * max([full, *(one.at for one in marks)])), title)
    lines = [line for codec in record.settings.codecs if (line := curve(record, codec, what, scale))]
    lines.append(Line((full, full), values.ends, GREY, 0.8, "dotted"))
    return Panel(places, values, tuple(marks), tuple(lines))


def mark(record: TradeoffsRecord, place: int, one: ArmFound, at: float) -> Mark:
    """One arm."""
    words = (
        one.name,
        one.family,
        f"KL {estimate(one.kl)} {KL_UNIT}",
        f"{number(one.stored)} bytes stored per token, {number(one.read / KIB)} KiB read in a step",
    )
    return Mark(place, at, one.kl.value, one.kl.low, one.kl.high, words, look(record, one))


def look(record: TradeoffsRecord, one: ArmFound) -> Look:
    """Kinds of a family, as codecs and policies, are told apart."""
    looks = CODECS if one.family == "codec" else LOOKS[one.family]
    kinds = list(dict.fromkeys(kind(other) for other in record.arms if other.family == one.family))
    return looks[kinds.index(kind(one)) % len(looks)]


def kind(one: ArmFound) -> str:
    """The codec, policy or pattern that an arm's name begins with; combinations are one kind."""
    return NAMES.get(one.family) or re.split("[ ,:]", one.name)[0]


def curve(record: TradeoffsRecord, codec: str, what: str, scale: float) -> Line | None:
    """A line through the widths of a codec."""
    mine = [one for one in record.arms if one.family == "codec" and one.name.split()[0] == codec and one.kl.value > 0]
    mine.sort(key=lambda one: one.stored)
    if len(mine) < 2:
        return None
    places = tuple(getattr(one, what) / scale for one in mine)
    return Line(places, tuple(one.kl.value for one in mine), look(record, mine[0]).colour, 1.2)


def keys(record: TradeoffsRecord) -> list[LegendKey]:
    """The legend."""
    found = {}
    for one in record.arms:
        name = kind(one) if kind(one) in (one.family, *NAMES.values()) else f"{one.family} {kind(one)}"
        found[name] = LegendKey(name.replace("_", " "), look(record, one))
    if record.drafted:
        found["self-speculation"] = LegendKey("self-speculation (no loss)", DRAFTED)
    return [*found.values(), LegendKey("16 bits", line=Line((), (), GREY, 0.8, "dotted"))]
