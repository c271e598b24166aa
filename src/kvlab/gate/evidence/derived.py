"""The quality status that a row's evidence earns: derived, never typed by anybody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvlab.gate.catalogue.columns import Status
from kvlab.gate.evidence.faults import UNWITNESSED, mechanisms_of, problems
from kvlab.gate.evidence.quality import NOT_INSIDE, Judgement, beside, judge
from kvlab.gate.evidence.record import Evidence, parse, well_formed
from kvlab.gate.reasons import Reason
from kvlab.gate.registry import Registry


class Derived(NamedTuple):
    """What the evidence of a row amounts to: `status` is the row's `quality_eval_status`."""

    status: Status
    judgements: tuple[Judgement, ...]
    reasons: tuple[Reason, ...]

    @property
    def p(self) -> float:
        """p-value of "some metric loses its margin or more": the largest of the metrics'.

        `NOT_INSIDE` where something is wrong with the evidence, or there is none.
        """
        return NOT_INSIDE if self.reasons else max((one.p for one in self.judgements), default=NOT_INSIDE)


def status(
    row: Mapping, evidence: object, registry: Registry, current: Mapping[str, Mapping[str, str]] | None = None
) -> Derived:
    """The quality status that a row's evidence earns.

    ``failed`` when a metric is ``beyond`` in evidence without a problem but that it was imported; ``not_required`` when
    the mechanism is registered as lossless; ``completed`` when nothing is wrong with any evidence, the eval that the
    row names is among it, and every metric is ``within``; otherwise ``pending``. Everything attached is judged, and
    what the run scored or the mechanism must show is missed, so that a bad result cannot be hidden behind a good one.

    Parameters
    ----------
    row : mapping
        A row as `kvlab.gate.catalogue` checks it.
    evidence : Evidence, JSON object, None, or a sequence of these
        What is attached to the row.
    registry : Registry
    current : mapping of str to mapping, optional
        By model what is current now: ``model_hash``, ``corpus_hash``, ``code``. Without it, staleness is told only
        by what the row says of itself.

    Returns
    -------
    Derived
        Judgements of the evidence without a problem, and everything that is wrong with the rest.
    """
    pieces, lossless = _pieces(evidence), _lossless(row, registry)
    reasons: list[Reason] = []
    judgements: list[Judgement] = []
    for piece in pieces:
        found = problems(piece, row, registry, current)
        reasons += found
        if all(reason.code == UNWITNESSED for reason in found):
            judgements += judgements_of(parse(piece), registry)
    if not lossless:
        reasons += _uncited(pieces, row, registry)
    reasons += _left_out(pieces, row, registry)
    return Derived(_status(judgements, reasons, lossless), tuple(judgements), tuple(reasons))


def judgements_of(evidence: Evidence, registry: Registry) -> list[Judgement]:
    """The word on every registered metric of evidence that has no problem."""
    return [
        beside(judge(metric, evidence.paired.get(key), evidence.metrics[key]), metric, evidence.baseline.get(key))
        for metric in registry.eval(evidence.quality_eval_id).metrics
        for key in [metric.key]
    ]


def _status(judgements: Sequence[Judgement], reasons: Sequence[Reason], lossless: bool) -> Status:
    words = {judgement.word for judgement in judgements}
    if "beyond" in words:
        return "failed"
    if lossless:
        return "not_required"
    return "completed" if words == {"within"} and not reasons else "pending"


def _pieces(evidence: object) -> list:
    if evidence is None:
        return []
    alone = isinstance(evidence, Evidence | Mapping | str) or not isinstance(evidence, Sequence)
    return [evidence] if alone else list(evidence)


def _lossless(row: Mapping, registry: Registry) -> bool:
    """Whether every mechanism of the row is registered as one that changes nothing."""
    return all(mechanism is not None and mechanism.lossless for mechanism in mechanisms_of(row, registry))


def _uncited(pieces: list, row: Mapping, registry: Registry) -> Iterator[Reason]:
    """What is wrong when no evidence is of the eval that the row names, or that eval cannot carry the claim."""
    cited = row.get("quality_eval_id")
    attached = [p.quality_eval_id if isinstance(p, Evidence) else _named(p) for p in pieces]
    if not pieces or not cited:
        yield Reason(code="evidence_missing", field="quality_eval_id", said=f"is {cited!r}, evidence: {len(pieces)}")
    elif cited not in attached:
        others = ", ".join(sorted(map(str, attached)))
        yield Reason(code="evidence_other_eval", field="quality_eval_id", said=f"is {cited!r}, evidence is of {others}")
    for mechanism in filter(None, mechanisms_of(row, registry)):
        if cited in registry.evals and not registry.carries(cited, mechanism):
            said = f"is {cited!r}, for {mechanism.name} it must be one of {', '.join(mechanism.evals)}"
            yield Reason(code="evidence_unsuited_eval", field="quality_eval_id", said=said)


def _left_out(pieces: list, row: Mapping, registry: Registry) -> Iterator[Reason]:
    """Evals whose evidence should be attached and is not: who may choose what is shown chooses the outcome."""
    known = well_formed(pieces)
    attached = {piece.quality_eval_id for piece in known}
    for name in sorted({name for piece in known for name in piece.evals} - attached):
        yield Reason(code="evidence_withheld", field="evidence", said=f"of {name} is not attached; the run scored it")
    shown, tokens = {entry.scope for entry in map(registry.eval, attached) if entry}, row.get("context_tokens")
    for mechanism in filter(None, mechanisms_of(row, registry)):
        for scope in mechanism.must_show if known else ():
            evals = [entry for entry in registry.evals.values() if entry.scope == scope]
            speaking = [entry for entry in evals if entry.own_contexts or tokens is None or entry.covers(tokens)]
            if scope not in shown and speaking:
                names = " or ".join(entry.quality_eval_id for entry in speaking)
                said = f"has none of {scope}, which {mechanism.name} must show; attach {names}"
                yield Reason(code="evidence_incomplete", field="evidence", said=said)


def _named(piece: object) -> object:
    return piece.get("quality_eval_id") if isinstance(piece, Mapping) else None
