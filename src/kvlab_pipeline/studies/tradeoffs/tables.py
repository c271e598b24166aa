"""The page of the study: what every way costs and buys, what that is against a codec, and self-speculation."""

from __future__ import annotations

from kvlab.output.format import DASH, number, percent
from kvlab_pipeline.studies.table import Table, estimate
from kvlab_pipeline.studies.tradeoffs.figure import KIB, figure
from kvlab_pipeline.studies.tradeoffs.record import TradeoffsRecord

__all__ = ["ABOUT", "TITLE", "figure", "tables"]

TITLE = "What makes a KV cache cheaper, and what it costs"
ABOUT = """A codec stores every token in fewer bits. An eviction drops tokens, a latent cache stores fewer numbers of
each, sparse reading stores everything and reads a part of it, and self-speculation stores an exact cache beside a coded
one and reads the exact one less often. All of them are measured here in one loop: the same windows of a text that no
calibration saw, the same untouched cache for reference, the same needles. KL is of the next token's distribution, the
untouched model's first, in nats per token. Bytes are counted, everything that is stored beside K and V included;
calibrations, which all texts share, are not. A step reads the stored context and, in 16 bits, the tokens since."""


def tables(record: TradeoffsRecord) -> list[Table]:
    """What it costs, by family; against the leading codec; the drafters; and what vouches for it."""
    return [said(record), costs(record), against(record), drafts(record), vouched(record)]


def said(record: TradeoffsRecord) -> Table:
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
    return Table("What to take from it", text, (), ())


def costs(record: TradeoffsRecord) -> Table:
    """Every arm."""
    text = (
        f"{record.arms[0].kl.n} windows of {record.context} stored and {record.eval} scored tokens,"
        f" {record.arms[0].found.n} needles in as many texts; intervals ({percent(record.confidence)}) are over windows"
        f" and over texts. Rounding to 16 bits alone costs KL {number(record.rounding.value)}, finds"
        f" {estimate(record.exact_found, 100)} % of the needles, takes"
        f" {number(record.full)} bytes for a token and reads {number(record.full_read / KIB)} KiB in a"
        " step. Tokens per second are of one loop that feeds single tokens"
        f" on this machine's CPU ({record.threads} thread): they say what the forms that run here take, and nothing of"
        " kernels that read coded or chosen bytes alone; a dash stands where no such form is."
    )
    rows = [
        (
            one.family,
            f"`{one.name}`",
            number(8 * one.stored / record.values),
            number(one.stored),
            number(one.read / KIB),
            estimate(one.kl),
            estimate(one.top1, 100),
            estimate(one.found, 100),
            DASH if one.per_second is None else number(one.per_second),
        )
        for one in record.arms
    ]
    rows.insert(0, ("none", "16 bits", "16", number(record.full), number(record.full_read / KIB),
                    number(record.rounding.value), DASH, estimate(record.exact_found, 100),
                    number(record.exact_per_second)))  # fmt: skip
    header = (
        *("kind", "setting", "bits per value", "bytes stored per token", "KiB read per step", "KL"),
        *("same top token, %", "needles found, %", "tokens per second"),
    )
    return Table("What each costs and buys", text, header, tuple(rows))


def against(record: TradeoffsRecord) -> Table:
    """Paired differences at no more bytes."""
    lead = record.settings.codecs[0]
    text = (
        f"KL less that of the widest `{lead}` which stores no more, paired by window. Above zero, `{lead}` is the"
        " better use of the same memory; an interval that holds 0 tells nothing apart. Sparse reading stores all"
        " in 16 bits:"
        " it is here for what it would have to be worth in reading."
    )
    rows = [
        (one.family, f"`{one.name}`", number(one.stored), f"`{one.rival}`", estimate(one.against, signed=True))
        for one in record.arms
        if one.against is not None
    ]
    header = ("kind", "setting", "bytes stored per token", "held against", "difference of KL")
    return Table("At equal bytes stored", text, header, tuple(rows))


def drafts(record: TradeoffsRecord) -> Table:
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
    rows = [
        (
            f"`{one.name}`",
            str(one.draft),
            estimate(one.accepted, 100),
            number(one.tokens_per_call),
            number(one.stored),
            f"{number(one.read(per_token) / KIB)} of {number(record.full_read / KIB)}",
            f"{number(one.per_second)} against {number(one.plain_per_second)}",
        )
        for one in record.drafted
    ]
    header = (
        *("drafter", "tokens of a draft", "accepted, %", "tokens per call", "bytes stored per token"),
        *("KiB read per written token", "tokens per second, and without, prefill included"),
    )
    return Table("Self-speculation", text, header, tuple(rows))


def vouched(record: TradeoffsRecord) -> Table:
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
    return Table("What vouches for the numbers", text, (), ())
