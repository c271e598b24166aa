"""The tables of RESTORE.md. Torch-free."""

from __future__ import annotations

import statistics

from kvlab.output.format import DASH, estimate, number, percent
from kvlab_pipeline.rendering import tables as cols
from kvlab_pipeline.rendering.tables import Column, TitledTable
from kvlab_pipeline.studies.restore import promises
from kvlab_pipeline.studies.restore.record import RestoreRecord, break_even

TITLE = "Restoring a context from a snapshot"
ABOUT = """\
A snapshot holds the KV cache of a context's whole chunks. A prompt that begins as the context did takes them from the
file and computes the rest. This page asks whether the answer is the same, what that saves, what it costs to load, and
what becomes of it when K and V are stored coded. Times are of this machine and change from run to run; everything else
does not."""


def tables(record: RestoreRecord) -> list[TitledTable]:
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
        columns = {"codec": cols.text("label"), "why": cols.text("reason")}
        found.append(TitledTable("Not measured", "", columns, record.unstored))
    return found


def _harness(record: RestoreRecord) -> TitledTable:
    found = record.harness
    text = (
        f"Three arms answer one prompt of {found.length} tokens in turn, {found.repeats} times each: without a"
        " snapshot, from one, and both ways at once. It passes only where every arm repeats itself and all give the"
        " same tokens, the arm with a snapshot really used it and the one without none, no time is missing, and two"
        " controls, the snapshot with one bit flipped and the snapshot of another prompt, were refused for just that."
        " The speed-up is that of the prefill alone, and is withheld unless the outcome is `pass`."
    )
    columns = {
        "outcome": cols.text("outcome"),
        "tokens restored": cols.number("prefix_len"),
        "speed-up": cols.number("speedup"),
        "reasons": lambda one: "; ".join(one.reasons) or DASH,
    }
    return TitledTable("Verdict", text, columns, [found])


def _identity(record: RestoreRecord) -> TitledTable:
    text = (
        f"{record.settings.prompts} prompts of {record.settings.prompt_tokens} tokens, each answered cold and from a"
        f" snapshot of all but its last {record.settings.suffix}, cut down to whole chunks of"
        f" {record.settings.chunk_tokens}. Equal logits are equal bits, after the prompt and after every token of"
        " the answer. The new process loads the model itself and knows nothing but the files."
    )
    columns = {
        "dtype": cols.text("dtype"),
        "process": cols.text("process"),
        "tokens restored": cols.number("prefix_len"),
        "answers equal": _of_prompts("tokens_equal"),
        "logits equal": _of_prompts("logits_equal"),
    }
    return TitledTable("Cold against warm", text, columns, record.agreements)


def _of_prompts(name: str) -> Column:
    """So many of the prompts."""
    return lambda one: f"{getattr(one, name)} of {one.prompts}"


def _evicted(record: RestoreRecord) -> TitledTable:
    text = (
        f"The same in a pool of {percent(record.settings.pool, 0)} of the prompt, where chunks have to go while it is"
        " read: the snapshot was made in such a pool, and carries scores and clock, so that the warm run evicts what"
        " the cold one does."
    )
    columns = {
        "policy": cols.text("policy"),
        "restored": _of_prompts("restored"),
        "chunks paged out": cols.number("page_outs"),
        "answers equal": _of_prompts("tokens_equal"),
        "same chunks resident": _of_prompts("residency_equal"),
        "largest difference": cols.number("max_abs_dlogit"),
    }
    return TitledTable("In a small pool", text, columns, record.evicted)


def _prefill(record: RestoreRecord) -> TitledTable:
    text = (
        "Cold over warm, medians of the rounds, loading left out; the ideal is 1 / (1 - reuse), as if every token"
        " were as dear as every other. A later token costs more than an earlier one, and a forward costs something"
        f" however short it is, so the ideal is not reached; due is {percent(promises.LEAST_SHARE, 0)} of it. In"
        " brackets stand the least and the greatest round."
    )
    columns = {
        "tokens": cols.number("length"),
        "reuse": lambda one: percent(one.reuse),
        "cold ms": _median("cold_ms"),
        "warm ms": _median("warm_ms"),
        "cold / warm": lambda one: f"{number(one.ratio)} [{number(min(one.by_round))}, {number(max(one.by_round))}]",
        "ideal": cols.number("ideal"),
        "share of the ideal": lambda one: percent(one.ratio / one.ideal, 0),
    }
    speeds = [speed for speed in record.speeds if speed.length in record.settings.lengths]
    return TitledTable("Prefill", text, columns, speeds)


def _median(name: str) -> Column:
    """Of some times."""
    return lambda one: number(statistics.median(getattr(one, name)))


def _load(record: RestoreRecord) -> TitledTable:
    text = (
        "What the warm run pays on top, and the rival that cuts nothing: one forward over the whole prompt into"
        " transformers' own cache. The last two columns are what a user waits for, loading included."
    )
    columns = {
        "tokens": cols.number("length"),
        "file bytes": cols.number("file_bytes"),
        "bytes read": cols.number("bytes_read"),
        "save ms": cols.number("save_ms"),
        "load ms": _median("load_ms"),
        "one forward ms": _median("whole_ms"),
        "against cold": lambda one: f"{number(statistics.median(one.cold_ms) / one.restore_ms)} ×",
        "against one": lambda one: f"{number(statistics.median(one.whole_ms) / one.restore_ms)} ×",
    }
    return TitledTable("Loading, and the rival", text, columns, record.speeds)


def _break_even(record: RestoreRecord) -> TitledTable:
    measured = sorted(speed.length for speed in record.speeds)
    text = (
        f"The shortest of the measured lengths ({', '.join(map(str, measured))}) from which on loading and prefilling"
        " the rest takes less than computing all of it; a dash where no such length was seen."
    )
    columns = {
        "against": lambda row: row[0],
        "from tokens": lambda row: number(break_even(record.speeds, row[1])),
    }
    rivals = [("prefill chunk by chunk", "cold"), ("one forward", "whole")]
    return TitledTable("Where restoring pays", text, columns, rivals)


def _stored(record: RestoreRecord) -> TitledTable:
    settings = record.settings
    text = (
        f"The first {settings.windows} test windows, their contexts stored in chunks of {settings.codec_chunk_tokens}"
        " tokens, each chunk coded by itself: a codec whose blocks are longer elsewhere stores its own tables more"
        " often here. Bytes are all of the payload. KL (nats per token) and the most likely token are those of the"
        " tokens after the context, teacher-forced, against the restore of K and V as they are; the last column is"
        f" how many of {settings.decode} greedily decoded tokens come before the first other one."
    )
    columns = {
        "payload": cols.text("label"),
        "bytes/token": cols.number("bytes_per_token", 4),
        "bits/value": cols.number("bits_per_value"),
        "save ms": _median("save_ms"),
        "load ms": _median("load_ms"),
        "KL": cols.estimate("kl"),
        "same top token": lambda way: f"{estimate(way.top1_agreement, scale=100)} %",
        "equal tokens": cols.number("greedy"),
    }
    ordered = sorted(record.stored, key=lambda way: (way.recipe is not None, -way.bits_per_value, way.label))
    return TitledTable("As they are against coded", text, columns, ordered)
