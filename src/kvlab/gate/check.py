"""The gate: what each row earns of the tier that it claims, with every reason, and one verdict on all rows.

A pure function of its arguments, of which one may measure again: no clock, no files. The order of the rows does not
matter, and equal arguments give the same bytes. What is wrong with a row is found of the row by itself; only how sure
its certification is hangs on how many rows are tested with it (`kvlab.gate.multiple_testing`), so that trying more of
them does not certify more by luck.

A row is certified where it earns the best tier and, in the same call, some of its items were measured again and came
out as it says (`kvlab.gate.replay`). Only rows that earn that tier are measured again, with the baseline of each.

The verdict is ``pass`` when every row that was judged earns what it claims, or is waived; ``fail`` when one does not;
``cannot_judge`` when none was judged, because nothing checked is not nothing wrong. Under `strict` every row has to
earn what it claims: one that is waived, or that declares no mechanism and so was not judged, fails the verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from pydantic import computed_field

from kvlab.core.codec_settings import Frozen
from kvlab.core.recipe import canonical, digest
from kvlab.gate.cases import BASELINE, Case, Context
from kvlab.gate.catalogue.columns import COLUMNS, DECLARED, TIERS
from kvlab.gate.catalogue.rows import Row
from kvlab.gate.catalogue.values import Value
from kvlab.gate.evidence import ALPHA, Status
from kvlab.gate.evidence.quality import Judgement
from kvlab.gate.multiple_testing import standings
from kvlab.gate.reasons import Reason
from kvlab.gate.replay import NOT_REPLAYED, Replay, Replayer
from kvlab.gate.rules import CRITERIA, Criterion
from kvlab.gate.rules.counts import others_of
from kvlab.gate.waivers import Waiver

Word = Literal["pass", "waived", "fail", "not_applicable"]
Verdict = Literal["pass", "fail", "cannot_judge"]
WORDS: tuple[Word, ...] = ("pass", "waived", "fail", "not_applicable")
EXIT_CODES: dict[Verdict, int] = {"pass": 0, "fail": 1, "cannot_judge": 2}
BEST_WAIVED = "reviewed_preview"
SCHEMA_VERSION = 3
BESIDE = ("run", "model", "engine")
"""Fields in which a row that is measured again and its baseline are equal."""

REFERENCE = tuple(column.name for column in COLUMNS if column.group in DECLARED and column.judged)
"""What a report says of which row it speaks: everything that is declared of it, but what is not judged."""

BADGES: dict[Status, str] = {
    "completed": "verified",
    "failed": "failed evaluation",
    "pending": "unverified",
    "not_required": "not required",
}


class Finding(Frozen):
    """A criterion that a row fails.

    `counts` says whether that keeps the row from its claim: hard ones always do, others where their `ceiling` is
    below the tier that is claimed. `waiver` is the one that is in force for it.
    """

    criterion: str
    hard: bool
    ceiling: str
    counts: bool
    reasons: tuple[Reason, ...]
    waiver: Waiver | None = None


class Claim(Frozen):
    """What the gate says of one row.

    Parameters
    ----------
    source : str
        Where the row is from.
    row : dict
        `REFERENCE`: which row it is.
    claimed, earned : str or None
        Tiers; `earned` is never above `claimed`. None where the row claims none, or was not judged.
    status : str or None
        Its `quality_eval_status` as its evidence has it; None when it was not judged.
    word : str
        ``pass``: it earns what it claims. ``waived``: it does not, and each criterion that it fails is waived.
        ``fail``. ``not_applicable``: it declares no mechanism, and nothing lossy was observed.
    badge : str
        The status in a word for readers.
    findings : tuple of Finding
        Every criterion that it fails, in the order of `kvlab.gate.rules.CRITERIA`.
    judgements : tuple of Judgement
        The words on the metrics of its evidence.
    replay : Replay or None
        What measuring again found; None where nothing was measured again.
    p, adjusted_p : float or None
        p-value of "some metric loses its margin or more" (`Derived.p`), and the same adjusted for all rows that were
        tested (Holm); None of a row without evidence, and of the baseline.
    """

    source: str
    row: dict[str, Value]
    claimed: str | None
    earned: str | None
    status: Status | None
    word: Word
    badge: str
    findings: tuple[Finding, ...]
    judgements: tuple[Judgement, ...]
    p: float | None = None
    adjusted_p: float | None = None
    replay: Replay | None = None

    @computed_field
    @property
    def certified(self) -> bool:
        """Whether it earns the best tier and came out the same when it was measured again."""
        return self.earned == TIERS[0] and self.replay is not None and self.replay.agrees

    @property
    def uncertified(self) -> str | None:
        """Why it is not certified although it earns the best tier; None where that is not so."""
        if self.earned != TIERS[0] or self.certified:
            return None
        lacking = self.replay and self.replay.lacking
        return f"{NOT_REPLAYED}: {lacking}" if lacking else NOT_REPLAYED

    @computed_field
    @property
    def failed_criteria(self) -> tuple[str, ...]:
        """Names of the criteria that keep the row from its claim; those that are waived are not among them."""
        return tuple(f.criterion for f in self.findings if f.counts and f.waiver is None)

    @property
    def codes(self) -> frozenset[str]:
        """Codes of all its reasons."""
        return frozenset(reason.code for finding in self.findings for reason in finding.reasons)


class GateReport(Frozen):
    """Claims in an order of their own, how many of each word, and the verdict.

    `registry` and `current` are digests of what the rows were judged against; `current` is None where nothing said
    what is current. `tested` is the number of rows over which p-values are adjusted, `alpha` what an adjusted one may
    be at most of a row that is certified.
    """

    schema_version: int = SCHEMA_VERSION
    registry: str
    current: str | None
    strict: bool
    verdict: Verdict
    exit_code: int
    counts: dict[str, int]
    alpha: float = ALPHA
    tested: int = 0
    claims: tuple[Claim, ...]


def check(rows: Iterable[Row], context: Context, strict: bool = False, replayer: Replayer | None = None) -> GateReport:
    """Judge rows.

    Parameters
    ----------
    rows : iterable of Row
    context : Context
    strict : bool
        Whether every row has to earn what it claims by itself.
    replayer : Replayer, optional
        Measures items of rows again; without it no row is certified.

    Returns
    -------
    Report
    """
    cases = [Case(row, context) for row in rows]
    families = [piece.family for case in cases for piece in case.evidence]
    standing = standings([case.own.p if case.tested else None for case in cases], families)
    beside = zip(cases, standing, others_of(cases), strict=True)
    placed = (replace(case, standing=found, others=said) for case, found, said in beside)
    placed = _replayed(list(placed), replayer) if replayer else placed
    claims = sorted(map(claim_of, placed), key=_order)
    counts = {word: sum(claim.word == word for claim in claims) for word in WORDS}
    verdict = _verdict(counts, strict)
    return GateReport(
        registry=context.registry.digest,
        current=None if context.current is None else digest(context.current),
        strict=strict,
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        counts=counts,
        tested=max((found.tested for found in standing if found is not None), default=0),
        claims=tuple(claims),
    )


def _replayed(cases: list[Case], replayer: Replayer) -> list[Case]:
    """The cases with what measuring again found of those that would be certified, and of their baselines."""

    def beside(case: Case) -> tuple[Value, ...]:
        return tuple(case.values[name] for name in BESIDE)

    best = [number for number, case in enumerate(cases) if claim_of(case).earned == TIERS[0]]
    tried = {beside(cases[number]) for number in best if set(cases[number].names) != {BASELINE}}
    due = [number for number in best if beside(cases[number]) in tried]
    found = replayer([cases[number].row for number in due]) if due else ()
    for number, replay in zip(due, found, strict=True):
        cases[number] = replace(cases[number], replay=replay)
    return cases


def _order(claim: Claim) -> tuple[str, str]:
    return str(claim.row["row_id"]), canonical(claim.model_dump(mode="json"))


def _verdict(counts: dict[str, int], strict: bool) -> Verdict:
    missing = counts["fail"] + (counts["waived"] + counts["not_applicable"] if strict else 0)
    if missing:
        return "fail"
    return "pass" if counts["pass"] + counts["waived"] else "cannot_judge"


# ----------------------------------------------------------------------------------- one row


def claim_of(case: Case) -> Claim:
    """What one row earns, and everything that is wrong with it."""
    claimed = case.fields.support_status
    findings = tuple(filter(None, (_finding(criterion, case, claimed) for criterion in CRITERIA)))
    judged = bool(case.names or findings)
    status = case.derived.status if judged else None
    return Claim(
        # a file's name may hold bytes that are no text; a report is text
        source=case.row.source.encode("utf-8", "backslashreplace").decode(),
        row={name: case.values[name] for name in REFERENCE},
        claimed=claimed,
        earned=_earned(claimed, findings) if judged else None,
        status=status,
        word=_word(findings) if judged else "not_applicable",
        badge=BADGES[status] if status else "not judged",
        findings=findings,
        judgements=case.derived.judgements if judged else (),
        p=case.standing and case.standing.p,
        adjusted_p=case.standing and case.standing.adjusted,
        replay=case.replay,
    )


def _finding(criterion: Criterion, case: Case, claimed: str | None) -> Finding | None:
    """None when the criterion holds; of a malformed row only those that say so are asked, the rest would guess."""
    if case.malformed and not criterion.of_fields:
        return None
    reasons = criterion.reasons(case)
    if not reasons:
        return None
    ceiling = criterion.leaves(reasons)
    waiver, expired = (None, ()) if criterion.hard else _waivers(criterion, case)
    return Finding(
        criterion=criterion.name,
        hard=criterion.hard,
        ceiling=ceiling,
        counts=criterion.hard or _below(ceiling, claimed),
        reasons=reasons + expired,
        waiver=waiver,
    )


def _waivers(criterion: Criterion, case: Case) -> tuple[Waiver | None, tuple[Reason, ...]]:
    """The waiver in force with the most distant last day, or what is to be said of those that have expired."""
    context = case.context
    covering = [waiver for waiver in context.waivers if waiver.covers(case.values, criterion.name)]
    in_force = [waiver for waiver in covering if not waiver.expired(context.today)]
    if in_force:
        return max(in_force, key=lambda waiver: (waiver.expires, str(waiver))), ()
    said = (f"of {waiver.owner} for {criterion.name!r} expired after {waiver.expires}" for waiver in covering)
    return None, tuple(Reason(code="waiver_expired", field="waiver", said=words) for words in sorted(set(said)))


def _below(tier: str, claimed: str | None) -> bool:
    return claimed is not None and TIERS.index(tier) > TIERS.index(claimed)


def _earned(claimed: str | None, findings: tuple[Finding, ...]) -> str | None:
    """The worst of the claim, the ceilings, waived or not, and what a waived row can be at best."""
    if claimed is None:
        return None
    waived = [BEST_WAIVED for finding in findings if finding.waiver]
    return max([claimed, *waived, *(finding.ceiling for finding in findings)], key=TIERS.index)


def _word(findings: tuple[Finding, ...]) -> Word:
    counting = [finding for finding in findings if finding.counts]
    if not counting:
        return "pass"
    return "waived" if all(finding.waiver for finding in counting) else "fail"
