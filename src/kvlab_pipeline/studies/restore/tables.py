"""The tables of RESTORE.md, and whether a record keeps what restoring promises. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvlab.output.format import DASH, estimate, number, percent
from kvlab_pipeline.rendering import tables as cols
from kvlab_pipeline.rendering.tables import Column, table_if_any
from kvlab_pipeline.studies.restore.record import Evicted, RestoreRecord, RunAgreement, Speed, break_even

LEAST_SHARE = 0.7  # of the ideal ratio, which a restore of 90 % of a prompt has to reach
LEAST_REUSE, LEAST_LENGTH = 0.9, 1000
KEPT, BROKEN, OPEN = "kept", "not kept", "not measured"


def parts(record: RestoreRecord) -> dict[str, str | None]:
    """What the template places, by name."""
    found = promises(record)
    counts = {state: sum(one.state == state for one in found) for state in (BROKEN, OPEN)}
    unkept = " and ".join(f"{count} {state}" for state, count in counts.items() if count)
    reported = [speed for speed in record.speeds if speed.length in record.settings.lengths]
    rivals = {"prefill chunk by chunk": "cold", "one forward": "whole"}
    stored = sorted(record.stored, key=lambda way: (way.recipe is not None, -way.bits_per_value, way.label))
    return {
        "kept": f"**Of {len(found)} promises {unkept}.**" if unkept else f"All {len(found)} promises are kept.",
        "due": percent(LEAST_SHARE, 0),
        "promises": table_if_any(
            found,
            {
                "promise": cols.text("text"),
                "outcome": cols.text("state"),
                "why": lambda one: "; ".join(one.lines) or DASH,
            },
        ),
        "harness": table_if_any(
            [record.harness],
            {
                "outcome": cols.text("outcome"),
                "tokens restored": cols.number("prefix_len"),
                "speed-up": cols.number("speedup"),
                "reasons": lambda one: "; ".join(one.reasons) or DASH,
            },
        ),
        "agreements": table_if_any(
            record.agreements,
            {
                "dtype": cols.text("dtype"),
                "process": cols.text("process"),
                "tokens restored": cols.number("prefix_len"),
                "answers equal": _of_prompts("tokens_equal"),
                "logits equal": _of_prompts("logits_equal"),
            },
        ),
        "evicted": table_if_any(
            record.evicted,
            {
                "policy": cols.text("policy"),
                "restored": _of_prompts("restored"),
                "chunks paged out": cols.number("page_outs"),
                "answers equal": _of_prompts("tokens_equal"),
                "same chunks resident": _of_prompts("residency_equal"),
                "largest difference": cols.number("max_abs_dlogit"),
            },
        ),
        "prefill": table_if_any(
            reported,
            {
                "tokens": cols.number("length"),
                "reuse": lambda one: percent(one.reuse),
                "cold ms": _median("cold_ms"),
                "warm ms": _median("warm_ms"),
                "cold / warm": lambda one: (
                    f"{number(one.ratio)} [{number(min(one.by_round))}, {number(max(one.by_round))}]"
                ),
                "ideal": cols.number("ideal"),
                "share of the ideal": lambda one: percent(one.ratio / one.ideal, 0),
            },
        ),
        "loading": table_if_any(
            record.speeds,
            {
                "tokens": cols.number("length"),
                "file bytes": cols.number("file_bytes"),
                "bytes read": cols.number("bytes_read"),
                "save ms": cols.number("save_ms"),
                "load ms": _median("load_ms"),
                "one forward ms": _median("whole_ms"),
                "against cold": lambda one: f"{number(statistics.median(one.cold_ms) / one.restore_ms)} ×",
                "against one": lambda one: f"{number(statistics.median(one.whole_ms) / one.restore_ms)} ×",
            },
        ),
        "break_even": table_if_any(
            rivals,
            {"against": str, "from tokens": lambda name: number(break_even(record.speeds, rivals[name]))},
        ),
        "stored": table_if_any(
            stored,
            {
                "payload": cols.text("label"),
                "bytes/token": cols.number("bytes_per_token", 4),
                "bits/value": cols.number("bits_per_value"),
                "save ms": _median("save_ms"),
                "load ms": _median("load_ms"),
                "KL": cols.estimate("kl"),
                "same top token": lambda way: f"{estimate(way.top1_agreement, scale=100)} %",
                "equal tokens": cols.number("greedy"),
            },
        ),
        "unstored": table_if_any(record.unstored, {"codec": cols.text("label"), "why": cols.text("reason")}),
    }


def _of_prompts(name: str) -> Column:
    """So many of the prompts."""
    return lambda one: f"{getattr(one, name)} of {one.prompts}"


def _median(name: str) -> Column:
    """Of some times."""
    return lambda one: number(statistics.median(getattr(one, name)))


class Promise(NamedTuple):
    """One promise: what it says, what became of it, and why that is not `KEPT`."""

    text: str
    state: str
    lines: tuple[str, ...]


def promises(record: RestoreRecord) -> list[Promise]:
    """Every promise of the study, with what the record makes of it; a promise about nothing measured is not kept."""
    high = [one for one in record.agreements if one.dtype == "float32"]
    low = [one for one in record.agreements if one.dtype != "float32"]
    long = [
        speed
        for speed in record.speeds
        if speed.length in record.settings.lengths and speed.length >= LEAST_LENGTH and speed.reuse >= LEAST_REUSE
    ]
    faster = f"the rest of a prompt of {LEAST_LENGTH} tokens or more, {percent(LEAST_REUSE, 0)} of it restored,"
    return [
        _promise("float32: a warm run has the tokens and the logits of the cold run, bit for bit", _equal(high), high),
        _promise("lower precision: a warm run has the tokens of the cold run", _equal(low), low),
        _promise(
            "a pool too small for the prompt: the same tokens, logits and resident chunks",
            _unevicted(record.evicted),
            record.evicted,
        ),
        _promise(
            f"{faster} is prefilled with at least {LEAST_SHARE} of the ideal gain",
            _slow(long),
            long,
            f"no reported length from {LEAST_LENGTH} tokens on has {percent(LEAST_REUSE, 0)} of its prompt restored",
        ),
        _promise("the harness passes, which no restore does that takes nothing, or what it must not", _doubts(record)),
    ]


def _promise(
    text: str,
    lines: Iterable[str],
    measured: Sequence = (True,),
    missing: str = "nothing was measured of it",
) -> Promise:
    if not measured:
        return Promise(text, OPEN, (missing,))
    lines = tuple(lines)
    return Promise(text, BROKEN if lines else KEPT, lines)


def _equal(agreements: Iterable[RunAgreement]) -> Iterator[str]:
    for one in agreements:
        expected = {"answers": one.tokens_equal} | ({"logits": one.logits_equal} if one.dtype == "float32" else {})
        for what, count in expected.items():
            if count < one.prompts:
                yield f"{what} of {one.dtype} in {one.process} process are equal for {count} of {one.prompts} prompts"


def _unevicted(evicted: Iterable[Evicted]) -> Iterator[str]:
    for one in evicted:
        if one.restored < one.prompts or min(one.tokens_equal, one.residency_equal) < one.prompts:
            yield f"policy {one.policy} in a small pool is not the same, cold and warm, for every prompt"
        if one.max_abs_dlogit != 0 and one.max_abs_dlogit is not None:
            yield f"policy {one.policy} in a small pool has logits up to {number(one.max_abs_dlogit)} apart"
        if not one.page_outs:
            yield f"under policy {one.policy} no chunk had to go, so nothing was put to the test"


def _slow(speeds: Iterable[Speed]) -> Iterator[str]:
    for speed in speeds:
        if speed.ratio < LEAST_SHARE * speed.ideal:
            expected = number(LEAST_SHARE * speed.ideal)
            yield f"prefill of {speed.length} tokens is {number(speed.ratio)} times faster, due is {expected}"


def _doubts(record: RestoreRecord) -> Iterator[str]:
    if record.harness.outcome != "pass":
        yield f"the harness says {record.harness.outcome}: {'; '.join(record.harness.reasons)}"
