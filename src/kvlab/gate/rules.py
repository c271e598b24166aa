"""The criteria that a row is held to: the four published ones by their names, and what they were blind to.

A criterion is a fact about a row, whatever tier the row claims. Failing it leaves the row a tier at most; a hard one
fails the row at every tier besides, and nobody can waive it: the row contradicts itself or its registry, and is not
merely short of evidence.

Why the ceilings are where they are. Quality that evidence leaves open earns ``reviewed_preview``; quality that it shows
to be lost leaves ``too_lossy``, which is no preview of anything. Without evidence a row is ``gated``, which is less
than either: so nobody gains by leaving evidence out. What is wrong with evidence that is the row's own, such as age or
a missing metric, makes it count as none; evidence that was altered, that belongs to another row or that contradicts
this one is no lack but a falsehood, and hard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvlab.gate import counts, declarations, derivation, observations, read_checks
from kvlab.gate.cases import Case, Context
from kvlab.gate.catalogue.columns import TIERS, TOO_LOSSY
from kvlab.gate.evidence.faults import IDENTIFYING
from kvlab.gate.evidence.quality import Judgement
from kvlab.gate.reasons import EVIDENCE_REASONS, Reason

__all__ = ["CRITERIA", "FALSEHOODS", "PUBLISHED", "WAIVABLE", "Case", "Context", "Criterion"]

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


@dataclass(frozen=True)
class Criterion:
    """One thing that a row is held to.

    Parameters
    ----------
    name : str
        As reports and waivers call it.
    ceiling : str
        The best tier that a row can earn which fails it.
    hard : bool
        Whether failing it fails the row at every tier, without waivers.
    why : str
        What it guards against, in one line.
    find : function
        From a case to the reasons for which it fails; none when it holds.
    of_fields : bool
        Whether it is about the fields as they are written, and so is asked of malformed rows too.
    worse : mapping of str to str
        By code of a reason, a tier below the ceiling that it leaves instead.
    """

    name: str
    ceiling: str
    hard: bool
    why: str
    find: Callable[[Case], Iterable[Reason]]
    of_fields: bool = False
    worse: Mapping[str, str] = field(default_factory=dict)

    def reasons(self, case: Case) -> tuple[Reason, ...]:
        """Why the case fails it, in a fixed order."""
        return tuple(self.find(case))

    def leaves(self, reasons: Iterable[Reason]) -> str:
        """The best tier that a row can earn which fails it for these reasons."""
        left = [self.ceiling, *(self.worse[reason.code] for reason in reasons if reason.code in self.worse)]
        return max(left, key=TIERS.index)


# ------------------------------------------------------------------------------------- quality


def evidence_is_the_rows(case: Case) -> Iterator[Reason]:
    """Nothing false is attached."""
    yield from (reason for reason in case.derived.reasons if reason.code in FALSEHOODS)


def quality_shown(case: Case) -> Iterator[Reason]:
    """A lossy row's evidence shows, metric by metric, that the loss is within its margin."""
    derived, declared = case.derived, set(case.names)
    asked = declared != {declarations.BASELINE} or derived.status == "failed"
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


def measured_again(case: Case) -> Iterator[Reason]:
    """What was measured again of the row came out as it says."""
    yield from case.replay.differs if case.replay else ()


def status_derived(case: Case) -> Iterator[Reason]:
    """A status is derived from evidence; one that is typed may not say more.

    It may say less: a row that says ``pending`` while evidence shows a loss would otherwise gain by hiding it. For the
    same reason ``not_required`` rests on the registry alone.
    """
    typed = case.get("quality_eval_status")
    unbacked = {
        "completed": not (_all_within(case) or set(case.names) == {declarations.BASELINE}),
        "not_required": case.lossy or not case.registered,
    }
    if case.names and unbacked.get(typed, False):
        said = f"is {typed!r}; what the evidence amounts to is {case.derived.status!r}"
        yield Reason(code="status_overstated", field="quality_eval_status", said=said)


def _all_within(case: Case) -> bool:
    """Whether there is evidence, nothing is wrong with it, and no metric loses too much."""
    _, judgements, reasons = case.derived
    return bool(judgements) and not reasons and all(judgement.word == "within" for judgement in judgements)


def eval_decodes(case: Case) -> Iterator[Reason]:
    """The eval that speculative decoding rests on generates: one that scores a prefill never speculates."""
    entry = case.context.registry.eval(case.get("quality_eval_id"))
    if entry is not None and case.speculates and not entry.generates:
        said = f"is {entry.quality_eval_id!r}, which decodes no token: nothing is speculated there"
        yield Reason(code="eval_never_decodes", field="quality_eval_id", said=said)


def lossless_shown(case: Case) -> Iterator[Reason]:
    """A mechanism that is lossless by its mathematics is shown to be so in this implementation.

    Rounding, batch shapes and a wrong acceptance rule all break it, and none of them shows in the throughput.
    """
    if case.registered and case.speculates and not case.lossy and not _all_within(case):
        said = "is not shown to leave the output alone; attach evidence of an eval that decodes"
        yield Reason(code="lossless_unproven", field="mechanism", said=said)


# ------------------------------------------------------------------- codecs, and what reads less


def both(*finders: Callable[[Case], Iterable[Reason]]) -> Callable[[Case], Iterator[Reason]]:
    """One criterion of several things that can be wrong."""

    def find(case: Case) -> Iterator[Reason]:
        for finder in finders:
            yield from finder(case)

    return find


# ------------------------------------------------------------------------------------- the table

PUBLISHED = (
    "mechanism_variant registered",
    "quality_eval_status in accepted set",
    "supported+compression => quality_eval_status == completed",
    "speculative_decoding requires draft fields",
)

CRITERIA: tuple[Criterion, ...] = (
    Criterion(
        "fields are the catalogue's",
        "unsupported",
        True,
        "a misspelt field is lost, and a value of another kind escapes every rule",
        declarations.fields_allowed,
        of_fields=True,
    ),
    Criterion(
        PUBLISHED[0],
        "artifact_only",
        True,
        "a name that nobody defined certifies nothing",
        declarations.variant_registered,
    ),
    Criterion(
        PUBLISHED[1],
        "unsupported",
        True,
        "a word outside the vocabulary means what its author wants",
        declarations.status_accepted,
        of_fields=True,
    ),
    Criterion(
        PUBLISHED[2],
        "reviewed_preview",
        False,
        "a claim of support rests on evidence that the loss is within its margin, among all rows tested",
        quality_shown,
        worse={"quality_beyond": TOO_LOSSY} | LACKS,
    ),
    Criterion(
        PUBLISHED[3],
        "artifact_only",
        True,
        "without draft model and acceptance rate a speed-up cannot be repeated",
        declarations.draft_given,
    ),
    Criterion(
        "support_status is claimed",
        "unsupported",
        True,
        "a row that claims nothing would pass without having been judged",
        declarations.tier_claimed,
    ),
    Criterion(
        "declaration agrees with the registry",
        "unsupported",
        True,
        "one name with two meanings certifies the wrong one",
        declarations.agrees_with_registry,
    ),
    Criterion(
        "quality_eval_id registered",
        "artifact_only",
        True,
        "an eval that nobody defined has no margin to be inside of",
        declarations.eval_registered,
    ),
    Criterion(
        "own record overstates nothing",
        "unsupported",
        True,
        "a row cannot vouch for itself",
        declarations.record_overstates_nothing,
    ),
    Criterion(
        "what ran was declared",
        "unsupported",
        True,
        "a lossy run that declares nothing would be certified as the baseline",
        both(observations.ran_declared, read_checks.undeclared_pattern),
    ),
    Criterion(
        "what was declared ran",
        "unsupported",
        True,
        "a codec that never ran loses no quality",
        both(observations.declared_ran, read_checks.pattern_ran),
    ),
    Criterion(
        "numbers agree with one another",
        "unsupported",
        True,
        "a ratio without its denominator can be any ratio",
        both(observations.numbers_agree, read_checks.read_is_not_stored),
    ),
    Criterion(
        "numbers follow from the evidence",
        "unsupported",
        True,
        "a number that is typed beside good evidence would be certified with it",
        both(
            *(derivation.numbers_derived, derivation.baseline_is_one, derivation.one_run),
            *(counts.counts_possible, lambda case: case.others),
        ),
    ),
    Criterion(
        "evidence is the row's own",
        "unsupported",
        True,
        "altered or borrowed evidence shows nothing about this row",
        evidence_is_the_rows,
    ),
    Criterion(
        "measured again it is the same",
        "unsupported",
        True,
        "numbers that are made up as a whole agree with one another",
        measured_again,
    ),
    Criterion(
        "quality_eval_status is derived",
        "gated",
        False,
        "completed used to be whatever a variable said",
        status_derived,
    ),
    Criterion(
        "mechanism is not deprecated",
        "gated",
        False,
        "an entry that was given up is kept for old rows only",
        declarations.not_deprecated,
    ),
    Criterion(
        "baseline shows its own quality",
        "gated",
        False,
        "every other row is held against it",
        derivation.baseline_shown,
    ),
    Criterion(
        "eval exercises the mechanism",
        "reviewed_preview",
        False,
        "an eval that never exercises the mechanism finds no loss",
        eval_decodes,
    ),
    Criterion(
        "lossless is shown",
        "reviewed_preview",
        False,
        "lossless by its mathematics is not lossless in this build",
        lossless_shown,
    ),
    Criterion(
        "class names its implementation",
        "reviewed_preview",
        False,
        "unlike methods under one name would share one certification",
        declarations.class_names_implementation,
    ),
    Criterion(
        "what ran was observed",
        "reviewed_preview",
        False,
        "what nobody looked at cannot be told from the baseline",
        both(observations.observed, read_checks.pattern_observed),
    ),
    Criterion(
        "compression saves bytes",
        "reviewed_preview",
        False,
        "side information can outweigh what the codes save",
        both(observations.saves_bytes, read_checks.spares_reading),
    ),
)
"""In the order of reports: the four published ones after the fields that they read, then the corrections."""

WAIVABLE = tuple(criterion.name for criterion in CRITERIA if not criterion.hard)
