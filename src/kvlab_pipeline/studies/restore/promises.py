"""What restoring promises, and whether a record keeps it: the page says so before everything else. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvlab.output.format import DASH, number, percent
from kvlab_pipeline.rendering import tables as cols
from kvlab_pipeline.rendering.tables import TitledTable
from kvlab_pipeline.studies.restore.record import Evicted, RestoreRecord, RunAgreement, Speed

LEAST_SHARE = 0.7  # of the ideal ratio, which a restore of 90 % of a prompt has to reach
LEAST_REUSE, LEAST_LENGTH = 0.9, 1000
KEPT, BROKEN, OPEN = "kept", "not kept", "not measured"


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


def table(record: RestoreRecord) -> TitledTable:
    """The promises, and before them in one sentence whether all are kept."""
    found = promises(record)
    counts = {state: sum(one.state == state for one in found) for state in (BROKEN, OPEN)}
    said = " and ".join(f"{count} {state}" for state, count in counts.items() if count)
    text = f"**Of {len(found)} promises {said}.**" if said else f"All {len(found)} promises are kept."
    columns = {
        "promise": cols.text("text"),
        "outcome": cols.text("state"),
        "why": lambda one: "; ".join(one.lines) or DASH,
    }
    return TitledTable("Promises", text, columns, found)


def _promise(text: str, lines: Iterable[str], measured: Sequence = (True,), missing: str = "") -> Promise:
    if not measured:
        return Promise(text, OPEN, (missing or "nothing was measured of it",))
    lines = tuple(lines)
    return Promise(text, BROKEN if lines else KEPT, lines)


def _equal(agreements: Iterable[RunAgreement]) -> Iterable[str]:
    for one in agreements:
        expected = {"answers": one.tokens_equal} | ({"logits": one.logits_equal} if one.dtype == "float32" else {})
        for what, count in expected.items():
            if count < one.prompts:
                yield f"{what} of {one.dtype} in {one.process} process are equal for {count} of {one.prompts} prompts"


def _unevicted(evicted: Iterable[Evicted]) -> Iterable[str]:
    for one in evicted:
        if one.restored < one.prompts or min(one.tokens_equal, one.residency_equal) < one.prompts:
            yield f"policy {one.policy} in a small pool is not the same, cold and warm, for every prompt"
        if one.max_abs_dlogit != 0 and one.max_abs_dlogit is not None:
            yield f"policy {one.policy} in a small pool has logits up to {number(one.max_abs_dlogit)} apart"
        if not one.page_outs:
            yield f"under policy {one.policy} no chunk had to go, so nothing was put to the test"


def _slow(speeds: Iterable[Speed]) -> Iterable[str]:
    for speed in speeds:
        if speed.ratio < LEAST_SHARE * speed.ideal:
            expected = number(LEAST_SHARE * speed.ideal)
            yield f"prefill of {speed.length} tokens is {number(speed.ratio)} times faster, due is {expected}"


def _doubts(record: RestoreRecord) -> Iterable[str]:
    if record.harness.outcome != "pass":
        yield f"the harness says {record.harness.outcome}: {'; '.join(record.harness.reasons)}"
