"""What the verbs of `kvlab snapshot` say: lines for people, data for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from kvlab.pages.terminal import printable


def damages(reasons: Sequence) -> Iterable[str]:
    """What `verify` found of one file."""
    return [printable(f"{reason.message} [{reason.code}]") for reason in reasons] or ["whole"]


def report_data(done, answer: Sequence[int], text: str) -> dict:
    """What `restore` did, for programs; the digest tells whether two runs gave the same logits, bit for bit."""
    from kvlab.studies.restore.identity import digest

    report = dataclasses.asdict(done.report)
    report["reasons"] = [reason._asdict() for reason in done.report.reasons]
    return report | {
        "snapshot": report["snapshot"] and str(report["snapshot"]),
        "tokens": list(answer),
        "text": text,
        "logits_sha256": digest(done.logits.detach()),
        "resident": list(done.run.pager.resident),
    }


def report_lines(report, tokens: int, text: str) -> Iterable[str]:
    """The same for people."""
    if report.consumed:
        took = f"{_ms(report.load_ms)}, {report.bytes_read} bytes read"
        yield f"restored {report.prefix_len} of {tokens} tokens of {report.snapshot} in {took}"
    else:
        yield f"restored nothing of {tokens} tokens"
        yield from (printable(f"because {reason.message} [{reason.code}]") for reason in report.reasons)
    yield f"prefilled {report.tokens_prefilled} tokens in {_ms(report.prefill_ms)}"
    if report.from_keys is not None:
        scored = f"{report.from_keys} from keys, {report.from_seed} from the ledger, {report.missing} missing"
        yield f"scored chunks: {scored}"
    if report.lossless is False:
        yield "the payload is lossy: K and V are not those of the model, and the answer may be another"
    if report.other_numerics:
        yield f"made with another {', '.join(report.other_numerics)}: the last bits may differ"
    if said := report.comparison:
        yield from _compared(said)
    if text:
        yield f"answer: {printable(text)}"


def _ms(value: float | None) -> str:
    return "unknown time" if value is None else f"{value:.1f} ms"


def _compared(said) -> Iterable[str]:
    same = "the same tokens" if said.tokens_equal else f"other tokens from number {said.first_divergence} on"
    apart = f"logits up to {said.max_abs_dlogit:.3g} apart" if said.max_abs_dlogit else "the same logits"
    yield f"cold and warm, compared at {said.steps} tokens: {same}, {apart}"
    if not said.tokens_equal and said.margin_at_divergence is not None:
        yield f"the cold run's two best tokens were {said.margin_at_divergence:.3g} apart there"
    yield f"resident chunks: {'the same' if said.residency_equal else 'different'}"


def verified(report) -> int:
    """The exit code of a comparison: 0 when the warm run is the cold one as far as that is promised.

    Bits and residency are promised of a payload that gives back the bits, made as this run makes them; of any other
    the tokens decide. 2 when nothing was compared.
    """
    said = report.comparison
    if said is None:
        return 2
    promised = report.lossless and not report.other_numerics
    other_bits = said.max_abs_dlogit != 0 or not said.residency_equal
    return int(not said.tokens_equal or bool(promised and other_bits))


def diff_data(found) -> dict:
    """How two snapshots differ, for programs."""
    data = dataclasses.asdict(found) | {"same": found.same}
    return data | {"identity": [reason._asdict() for reason in found.identity]}


def diff_lines(found) -> Iterable[str]:
    """The same for people."""
    yield "the same" if found.same else "different"
    yield f"tokens: {found.shared_tokens} shared of {found.lengths[0]} and {found.lengths[1]}"
    yield from (f"identity: {reason.message} [{reason.code}]" for reason in found.identity)
    yield f"payload: {len(found.chunks)} of {found.compared_chunks} compared chunks differ"
    for chunk in found.chunks:
        share = "stored otherwise" if chunk.bits is None else f"{chunk.bits} of {chunk.of_bits} bits"
        yield f"chunk {chunk.number}: {share}"
    if found.ledger:
        yield f"ledger: differs on chunks {', '.join(map(str, found.ledger))}"
    yield from (f"note: {note}" for note in found.notes)
