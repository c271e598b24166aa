"""What a row's evidence shows: the loss of quality, and that the evidence is the row's own.

Why the ceilings are where they are. Quality that evidence leaves open earns ``reviewed_preview``; quality that it shows
to be lost leaves ``too_lossy``, which is no preview of anything. Without evidence a row is ``gated``, which is less
than either: so nobody gains by leaving evidence out. What is wrong with evidence that is the row's own, such as age or
a missing metric, makes it count as none; evidence that was altered, that belongs to another row or that contradicts
this one is no lack but a falsehood, and hard.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.gate.cases import BASELINE, Case
from kvlab.gate.catalogue.columns import TOO_LOSSY
from kvlab.gate.evidence.faults import IDENTIFYING
from kvlab.gate.evidence.quality import Judgement
from kvlab.gate.reasons import EVIDENCE_REASONS, Reason
from kvlab.gate.rules.criterion import rule

FALSEHOODS = {
    "evidence_malformed",
    "evidence_not_finite",
    "evidence_tampered",
    "evidence_contradicts_row",
    "evidence_other_codec",
    "evidence_other_backend",
    "evidence_other_served",
    "evidence_other_pattern",
    "evidence_range",
    *(f"evidence_other_{what}" for what in IDENTIFYING.values()),
}
"""What is wrong with evidence that cannot be this row's, or is not what was measured."""
LACKS = {code: "gated" for code in EVIDENCE_REASONS if code not in FALSEHOODS}
"""What makes evidence count as none, and what that leaves a row."""


@rule(
    3,
    "supported+compression => quality_eval_status == completed",
    why="a claim of support rests on evidence that the loss is within its margin, among all rows tested",
    leaves="reviewed_preview",
    worse={"quality_beyond": TOO_LOSSY} | LACKS,
)
def quality_shown(case: Case) -> Iterator[Reason]:
    """A lossy row's evidence shows, metric by metric, that the loss is within its margin."""
    derived, declared = case.derived, set(case.names)
    asked = declared != {BASELINE} or derived.status == "failed"
    if not declared or not asked or derived.status in ("completed", "not_required"):
        return
    lacking = [reason for reason in derived.reasons if reason.code not in FALSEHOODS]
    unsettled = [_unsettled(judgement) for judgement in derived.judgements if judgement.word != "within"]
    if derived.status == "failed":  # what is lost is lost, whatever evidence lacks
        lacking = []
    yield from [*lacking, *unsettled] or derived.reasons


def _unsettled(judgement: Judgement) -> Reason:
    found = []
    if judgement.loss is not None:
        interval = f"[{judgement.low:.4g}, {judgement.high:.4g}]"
        found.append(f"loses {judgement.loss:.4g} {interval}, its margin is {judgement.margin:.4g}")
    if judgement.room is not None and judgement.room < 0:
        found.append(f"may be {-judgement.room:.4g} short of its floor")
    if judgement.untold:
        found.append("cannot tell: the engine as it is is not shown to be better than chance")
    elif judgement.word == "open":
        n = judgement.needed_n
        found.append("no number of items settles it" if n is None else f"{n} items settle it")
    code = "quality_beyond" if judgement.word == "beyond" else "quality_open"
    return Reason(code=code, field=f"metrics.{judgement.key}", said="; ".join(found) or "has no limit to be held to")


@rule(
    13,
    "evidence is the row's own",
    why="altered or borrowed evidence shows nothing about this row",
    leaves="unsupported",
    hard=True,
)
def evidence_is_the_rows(case: Case) -> Iterator[Reason]:
    """Nothing false is attached."""
    yield from (reason for reason in case.derived.reasons if reason.code in FALSEHOODS)


@rule(
    14,
    "measured again it is the same",
    why="numbers that are made up as a whole agree with one another",
    leaves="unsupported",
    hard=True,
)
def measured_again(case: Case) -> Iterator[Reason]:
    """What was measured again of the row came out as it says."""
    yield from case.replay.differs if case.replay else ()


@rule(15, "quality_eval_status is derived", why="completed used to be whatever a variable said", leaves="gated")
def status_derived(case: Case) -> Iterator[Reason]:
    """A status is derived from evidence; one that is typed may not say more.

    It may say less: a row that says ``pending`` while evidence shows a loss would otherwise gain by hiding it. For the
    same reason ``not_required`` rests on the registry alone.
    """
    typed = case.fields.quality_eval_status
    unbacked = {
        "completed": not (_all_within(case) or set(case.names) == {BASELINE}),
        "not_required": case.lossy or not case.registered,
    }
    if case.names and unbacked.get(typed, False):
        said = f"is {typed!r}; what the evidence amounts to is {case.derived.status!r}"
        yield Reason(code="status_overstated", field="quality_eval_status", said=said)


def _all_within(case: Case) -> bool:
    """Whether there is evidence, nothing is wrong with it, and no metric loses too much."""
    _, judgements, reasons = case.derived
    return bool(judgements) and not reasons and all(judgement.word == "within" for judgement in judgements)


@rule(
    18,
    "eval exercises the mechanism",
    why="an eval that never exercises the mechanism finds no loss",
    leaves="reviewed_preview",
)
def eval_decodes(case: Case) -> Iterator[Reason]:
    """The eval that speculative decoding rests on generates: one that scores a prefill never speculates."""
    entry = case.context.registry.eval(case.fields.quality_eval_id)
    if entry is not None and case.speculates and not entry.generates:
        said = f"is {entry.quality_eval_id!r}, which decodes no token: nothing is speculated there"
        yield Reason(code="eval_never_decodes", field="quality_eval_id", said=said)


@rule(
    19,
    "lossless is shown",
    why="lossless by its mathematics is not lossless in this build",
    leaves="reviewed_preview",
)
def lossless_shown(case: Case) -> Iterator[Reason]:
    """A mechanism that is lossless by its mathematics is shown to be so in this implementation.

    Rounding, batch shapes and a wrong acceptance rule all break it, and none of them shows in the throughput.
    """
    if case.registered and case.speculates and not case.lossy and not _all_within(case):
        said = "is not shown to leave the output alone; attach evidence of an eval that decodes"
        yield Reason(code="lossless_unproven", field="mechanism", said=said)
