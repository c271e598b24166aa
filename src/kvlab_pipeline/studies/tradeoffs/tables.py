"""The page of the study: what every way costs and buys, what that is against a codec, and self-speculation."""

from __future__ import annotations

import re

from kvlab.output import format as fmt
from kvlab.output.format import DASH, estimate, number, percent
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
from kvlab_pipeline.rendering.tables import TitledTable
from kvlab_pipeline.studies.tradeoffs.record import ArmFound, TradeoffsRecord

__all__ = ["ABOUT", "TITLE", "figure", "tables"]

TITLE = "What makes a KV cache cheaper, and what it costs"
ABOUT = """A codec stores every token in fewer bits. An eviction drops tokens, a latent cache stores fewer numbers of
each, sparse reading stores everything and reads a part of it, and self-speculation stores an exact cache beside a coded
one and reads the exact one less often. All of them are measured here in one loop: the same windows of a text that no
calibration saw, the same untouched cache for reference, the same needles. KL is of the next token's distribution, the
untouched model's first, in nats per token. Bytes are counted, everything that is stored beside K and V included;
calibrations, which all texts share, are not. A step reads the stored context and, in 16 bits, the tokens since."""


def tables(record: TradeoffsRecord) -> list[TitledTable]:
    """What it costs, by family; against the leading codec; the drafters; and what vouches for it."""
    return [conclusions(record), costs(record), against(record), drafts(record), vouched(record)]


def conclusions(record: TradeoffsRecord) -> TitledTable:
    """The sentences that a reader decides by; every number is the record's."""
    lead = record.settings.codecs[0]
    told = [one for one in record.arms if one.against is not None]
    worse = [one for one in told if one.against.low > 0]
    better = [one for one in told if one.against.high < 0]
    text = f"Of {len(told)} arms beside `{lead}` that store no less than its narrowest setting, {len(worse)} lose more"
    text += f" than `{lead}` at no more bytes, and {len(better)} lose less; {len(told) - len(worse) - len(better)} are"
    text += " not told apart."
    least = min(
        (one for one in record.arms if one.family == "sparse reading"), key=lambda one: one.kl.value, default=None
    )
    if least is not None:
        text += (
            f" The best pattern of sparse reading reads {percent(least.read / record.full_read, 0)} of the bytes of 16"
            f" bits at KL {number(least.kl.value)}, and stores {percent(least.stored / record.full, 0)} of them."
        )
    for one in record.drafted:
        text += (
            f" Drafts of `{one.name}` are accepted to {percent(one.accepted.value, 0)} and cost no quality, at"
            f" {percent(one.stored / record.full, 0)} of the memory."
        )
    return TitledTable("What to take from it", text)


def costs(record: TradeoffsRecord) -> TitledTable:
    """Every arm."""
    text = (
        f"{record.arms[0].kl.n_windows} windows of {record.context} stored and {record.eval} scored tokens,"
        f" {record.arms[0].found.n_windows} needles in as many texts;"
        f" intervals ({percent(record.confidence)}) are over windows"
        f" and over texts. Rounding to 16 bits alone costs KL {number(record.rounding.value)}, finds"
        f" {estimate(record.exact_found, 100)} % of the needles, takes"
        f" {number(record.full)} bytes for a token and reads {number(record.full_read / KIB)} KiB in a"
        " step. Tokens per second are of one loop that feeds single tokens"
        f" on this machine's CPU ({record.threads} thread): they say what the forms that run here take, and nothing of"
        " kernels that read coded or chosen bytes alone; a dash stands where no such form is."
    )
    exact = {  # what there is without any arm, first
        "kind": "none",
        "setting": "16 bits",
        "bits per value": "16",
        "bytes stored per token": number(record.full),
        "KiB read per step": number(record.full_read / KIB),
        "KL": number(record.rounding.value),
        "needles found, %": estimate(record.exact_found, 100),
        "tokens per second": number(record.exact_per_second),
    }
    columns = {
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
    told = {
        name: lambda one, name=name, tell=tell: tell(one) if one else exact.get(name, DASH)
        for name, tell in columns.items()
    }
    return TitledTable("What each costs and buys", text, told, [None, *record.arms])


def against(record: TradeoffsRecord) -> TitledTable:
    """Paired differences at no more bytes."""
    lead = record.settings.codecs[0]
    text = (
        f"KL less that of the widest `{lead}` which stores no more, paired by window. Above zero, `{lead}` is the"
        " better use of the same memory; an interval that holds 0 tells nothing apart. Sparse reading stores all"
        " in 16 bits:"
        " it is here for what it would have to be worth in reading."
    )
    columns = {
        "kind": cols.text("family"),
        "setting": cols.code("name"),
        "bytes stored per token": cols.number("stored"),
        "held against": cols.code("rival"),
        "difference of KL": cols.estimate("against", signed=True),
    }
    return TitledTable("At equal bytes stored", text, columns, [one for one in record.arms if one.against is not None])


def drafts(record: TradeoffsRecord) -> TitledTable:
    """Self-speculation."""
    settings = record.settings
    per_token = record.full_read / record.full
    text = (
        f"{settings.prompts} prompts of {record.context} tokens, {settings.tokens} written greedily after each, drafts"
        " of at most the tokens told. What is written was compared with what the exact cache writes, and is the same"
        " but for ties in rounding: there is no loss to report. Bytes read are for one written token: the coded"
        " cache once"
        " for each drafted token, the exact one once a call."
    )
    columns = {
        "drafter": cols.code("name"),
        "tokens of a draft": cols.number("draft"),
        "accepted, %": cols.percent("accepted"),
        "tokens per call": cols.number("tokens_per_call"),
        "bytes stored per token": cols.number("stored"),
        "KiB read per written token": lambda one: (
            f"{number(one.read(per_token) / KIB)} of {number(record.full_read / KIB)}"
        ),
        "tokens per second, and without, prefill included": lambda one: (
            f"{number(one.per_second)} against {number(one.plain_per_second)}"
        ),
    }
    return TitledTable("Self-speculation", text, columns, record.drafted)


def vouched(record: TradeoffsRecord) -> TitledTable:
    """What a second computation said."""
    seen = [one for one in record.arms if one.witnessed is not None]
    unseen = [f"`{one.name}`" for one in record.arms if one.witnessed is None]
    worst = max((one.witnessed for one in seen), default=0.0)
    text = (
        f"The last window of {len(seen)} of {len(record.arms)} arms was computed a second time, by a forward that is"
        f" written out, over the K and V that were read; the logits are at most KL {number(worst)} apart."
    )
    text += f" Not computed twice: {', '.join(unseen)}." if unseen else ""
    text += (
        " For each arm that is no codec, keeping everything left the logits alone and keeping next to nothing moved"
        " them; of codecs, one bit moved them."
    )
    return TitledTable("What vouches for the numbers", text)


# The figure of the study: what each way to make a cache cheaper costs, over what it stores and over what it reads.

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
    lines = [one.kl.to_json() for one in record.arms]
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
    marks = [mark(record, place, one, getattr(one, what) / scale) for place, one in enumerate(record.arms)]
    for place, (name, at) in enumerate(drafted):
        words = (f"self-speculation, {name} drafts", "what is written is what the exact cache writes")
        marks.append(Mark(len(record.arms) + place, at[what], 0.0, 0.0, 0.0, words, DRAFTED))
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
        f"KL {fmt.estimate(one.kl.to_json())} {KL_UNIT}",
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


def keys(record: TradeoffsRecord) -> list[LegendKey]:
    """The legend."""
    found = {}
    for one in record.arms:
        name = kind(one) if kind(one) in (one.family, *NAMES.values()) else f"{one.family} {kind(one)}"
        found[name] = LegendKey(name.replace("_", " "), look(record, one))
    if record.drafted:
        found["self-speculation"] = LegendKey("self-speculation (no loss)", DRAFTED)
    return [*found.values(), LegendKey("16 bits", line=Line((), (), GREY, 0.8, "dotted"))]
