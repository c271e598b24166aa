"""The tables of RESTORE.md. Torch-free."""

from __future__ import annotations

import statistics

from kvlab.output.format import DASH, estimate, number, percent
from kvlab_pipeline.studies.restore import promises
from kvlab_pipeline.studies.restore.record import RestoreRecord, StorageResult, break_even
from kvlab_pipeline.studies.table import Table

TITLE = "Restoring a context from a snapshot"
ABOUT = """\
A snapshot holds the KV cache of a context's whole chunks. A prompt that begins as the context did takes them from the
file and computes the rest. This page asks whether the answer is the same, what that saves, what it costs to load, and
what becomes of it when K and V are stored coded. Times are of this machine and change from run to run; everything else
does not."""


def tables(record: RestoreRecord) -> list[Table]:
    """What the page says, in its order."""
    found = [
        promises.table(record),
        _harness(record),
        _identity(record),
        _evicted(record),
        _prefill(record),
        _load(record),
        _break_even(record),
    ]
    found.append(_stored(record))
    if record.unstored:
        rows = tuple((one.label, one.reason) for one in record.unstored)
        found.append(Table("Not measured", "", ("codec", "why"), rows))
    return found


def _harness(record: RestoreRecord) -> Table:
    found = record.harness
    text = (
        f"Three arms answer one prompt of {found.length} tokens in turn, {found.repeats} times each: without a"
        " snapshot, from one, and both ways at once. It passes only where every arm repeats itself and all give the"
        " same tokens, the arm with a snapshot really used it and the one without none, no time is missing, and two"
        " controls, the snapshot with one bit flipped and the snapshot of another prompt, were refused for just that."
        " The speed-up is that of the prefill alone, and is withheld unless the outcome is `pass`."
    )
    reasons = "; ".join(found.reasons) or DASH
    row = (found.outcome, number(found.prefix_len), number(found.speedup), reasons)
    return Table("Verdict", text, ("outcome", "tokens restored", "speed-up", "reasons"), (row,))


def _identity(record: RestoreRecord) -> Table:
    text = (
        f"{record.settings.prompts} prompts of {record.settings.prompt_tokens} tokens, each answered cold and from a"
        f" snapshot of all but its last {record.settings.suffix}, cut down to whole chunks of"
        f" {record.settings.chunk_tokens}. Equal logits are equal bits, after the prompt and after every token of"
        " the answer. The new process loads the model itself and knows nothing but the files."
    )
    header = ("dtype", "process", "tokens restored", "answers equal", "logits equal")
    rows = tuple(
        (
            one.dtype,
            one.process,
            number(one.prefix_len),
            f"{one.tokens_equal} of {one.prompts}",
            f"{one.logits_equal} of {one.prompts}",
        )
        for one in record.agreements
    )
    return Table("Cold against warm", text, header, rows)


def _evicted(record: RestoreRecord) -> Table:
    text = (
        f"The same in a pool of {percent(record.settings.pool, 0)} of the prompt, where chunks have to go while it is"
        " read: the snapshot was made in such a pool, and carries scores and clock, so that the warm run evicts what"
        " the cold one does."
    )
    header = ("policy", "restored", "chunks paged out", "answers equal", "same chunks resident", "largest difference")
    rows = tuple(
        (
            one.policy,
            f"{one.restored} of {one.prompts}",
            number(one.page_outs),
            f"{one.tokens_equal} of {one.prompts}",
            f"{one.residency_equal} of {one.prompts}",
            number(one.max_abs_dlogit),
        )
        for one in record.evicted
    )
    return Table("In a small pool", text, header, rows)


def _prefill(record: RestoreRecord) -> Table:
    text = (
        "Cold over warm, medians of the rounds, loading left out; the ideal is 1 / (1 - reuse), as if every token"
        " were as dear as every other. A later token costs more than an earlier one, and a forward costs something"
        f" however short it is, so the ideal is not reached; due is {percent(promises.LEAST_SHARE, 0)} of it. In"
        " brackets stand the least and the greatest round."
    )
    header = ("tokens", "reuse", "cold ms", "warm ms", "cold / warm", "ideal", "share of the ideal")
    rows = tuple(
        (
            number(speed.length),
            percent(speed.reuse),
            number(statistics.median(speed.cold_ms)),
            number(statistics.median(speed.warm_ms)),
            f"{number(speed.ratio)} [{number(min(speed.by_round))}, {number(max(speed.by_round))}]",
            number(speed.ideal),
            percent(speed.ratio / speed.ideal, 0),
        )
        for speed in record.speeds
        if speed.length in record.settings.lengths
    )
    return Table("Prefill", text, header, rows)


def _load(record: RestoreRecord) -> Table:
    text = (
        "What the warm run pays on top, and the rival that cuts nothing: one forward over the whole prompt into"
        " transformers' own cache. The last two columns are what a user waits for, loading included."
    )
    header = (
        "tokens",
        "file bytes",
        "bytes read",
        "save ms",
        "load ms",
        "one forward ms",
        "against cold",
        "against one",
    )
    rows = tuple(
        (
            number(speed.length),
            number(speed.file_bytes),
            number(speed.bytes_read),
            number(speed.save_ms),
            number(statistics.median(speed.load_ms)),
            number(statistics.median(speed.whole_ms)),
            f"{number(statistics.median(speed.cold_ms) / speed.restore_ms)} ×",
            f"{number(statistics.median(speed.whole_ms) / speed.restore_ms)} ×",
        )
        for speed in record.speeds
    )
    return Table("Loading, and the rival", text, header, rows)


def _break_even(record: RestoreRecord) -> Table:
    measured = sorted(speed.length for speed in record.speeds)
    text = (
        f"The shortest of the measured lengths ({', '.join(map(str, measured))}) from which on loading and prefilling"
        " the rest takes less than computing all of it; a dash where no such length was seen."
    )
    rows = (
        ("prefill chunk by chunk", number(break_even(record.speeds, "cold"))),
        ("one forward", number(break_even(record.speeds, "whole"))),
    )
    return Table("Where restoring pays", text, ("against", "from tokens"), rows)


def _stored(record: RestoreRecord) -> Table:
    settings = record.settings
    text = (
        f"The first {settings.windows} test windows, their contexts stored in chunks of {settings.codec_chunk_tokens}"
        " tokens, each chunk coded by itself: a codec whose blocks are longer elsewhere stores its own tables more"
        " often here. Bytes are all of the payload. KL (nats per token) and the most likely token are those of the"
        " tokens after the context, teacher-forced, against the restore of K and V as they are; the last column is"
        f" how many of {settings.decode} greedily decoded tokens come before the first other one."
    )
    header = ("payload", "bytes/token", "bits/value", "save ms", "load ms", "KL", "same top token", "equal tokens")
    ordered = sorted(record.stored, key=lambda way: (way.recipe is not None, -way.bits_per_value, way.label))
    return Table("As they are against coded", text, header, tuple(_stored_row(way) for way in ordered))


def _stored_row(way: StorageResult) -> tuple[str, ...]:
    return (
        way.label,
        number(way.bytes_per_token, 4),
        number(way.bits_per_value),
        number(statistics.median(way.save_ms)),
        number(statistics.median(way.load_ms)),
        estimate(way.kl),
        f"{estimate(way.top1_agreement, scale=100)} %",
        number(way.greedy),
    )
