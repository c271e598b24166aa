"""The figure of the study: what each way to make a cache cheaper costs, over what it stores and over what it reads."""

from __future__ import annotations

import re

from kvlab.output import format as fmt
from kvlab_pipeline.pages.figure import DOWN, GREY, INK, OTHER, UP, Axis, Figure, Key, Line, Look, Mark, Panel, log_axis
from kvlab_pipeline.pages.parts import KL_UNIT
from kvlab_pipeline.studies.tradeoffs.record import ArmFound, TradeoffsRecord

KIB = 1024
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
    lines = [one.kl.model_dump() for one in record.arms]
    values = log_axis(lines, f"KL, {KL_UNIT} (logarithmic)")
    tokens = record.full_read / record.full  # that a step has before it, on average
    drafted = [
        (one.name, {"stored": one.stored / KIB, "read": one.read(tokens) / KIB / tokens}) for one in record.drafted
    ]
    panels = (
        panel(record, "stored", KIB, "KiB stored for a token of the context", values, drafted),
        panel(record, "read", KIB * tokens, "KiB read in a step, by token before it", values, drafted),
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
    record: TradeoffsRecord, what: str, scale: float, title: str, values: Axis, drafted: list[tuple[str, dict]]
) -> Panel:
    """One axis of bytes."""
    marks = [mark(record, number, one, getattr(one, what) / scale) for number, one in enumerate(record.arms)]
    for number, (name, at) in enumerate(drafted):
        words = (f"self-speculation, {name} drafts", "what is written is what the exact cache writes")
        marks.append(Mark(len(record.arms) + number, at[what], 0.0, 0.0, 0.0, words, DRAFTED))
    full = record.full / KIB
    widest = max([full, *(one.at for one in marks)])
    places = Axis((0.0, 1.05 * widest), title)
    lines = [line for codec in record.settings.codecs if (line := curve(record, codec, what, scale))]
    lines.append(Line((full, full), values.ends, GREY, 0.8, "dotted"))
    return Panel(places, values, tuple(marks), tuple(lines))


def mark(record: TradeoffsRecord, number: int, one: ArmFound, at: float) -> Mark:
    """One arm."""
    words = (
        one.name,
        one.family,
        f"KL {fmt.estimate(one.kl.model_dump())} {KL_UNIT}",
        f"{fmt.number(one.stored)} bytes stored per token, {fmt.number(one.read / KIB)} KiB read in a step",
    )
    return Mark(number, at, one.kl.value, one.kl.low, one.kl.high, words, look(record, one))


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


def keys(record: TradeoffsRecord) -> list[Key]:
    """The legend."""
    found = {}
    for one in record.arms:
        name = kind(one) if kind(one) in (one.family, *NAMES.values()) else f"{one.family} {kind(one)}"
        found[name] = Key(name.replace("_", " "), look(record, one))
    if record.drafted:
        found["self-speculation"] = Key("self-speculation (no loss)", DRAFTED)
    return [*found.values(), Key("16 bits", line=Line((), (), GREY, 0.8, "dotted"))]
