"""What a row declares, held against the catalogue and the registry; rules 0 to 2, 4 to 8, 16 and 20."""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.core.errors import suggestion
from kvlab.gate.cases import BASELINE, Case, CombinedPart
from kvlab.gate.catalogue.columns import COMPRESSION, SPECULATIVE
from kvlab.gate.reasons import Reason
from kvlab.gate.rules.criterion import rule

STATUS = "quality_eval_status"
DRAFT_FIELDS = ("draft_model_id", "speculative_acceptance_rate", "speculative_wasted_tokens")
FLAGS = {"mechanism_eval_registered": "mechanism_variant", "quality_eval_registered": "quality_eval_id"}


@rule(
    0,
    "fields are the catalogue's",
    why="a misspelt field is lost, and a value of another kind escapes every rule",
    leaves="unsupported",
    hard=True,
    of_fields=True,
)
def fields_allowed(case: Case) -> Iterator[Reason]:
    """Every field is the catalogue's and holds what its column allows; the status has a criterion of its own."""
    yield from (reason for reason in case.malformed if reason.field != STATUS)


@rule(
    1,
    "mechanism_variant registered",
    why="a name that nobody defined certifies nothing",
    leaves="artifact_only",
    hard=True,
)
def variant_registered(case: Case) -> Iterator[Reason]:
    """Each mechanism and its variant are registered, looked up here and now, whatever the row says of itself."""
    if case.names and len(case.names) != len(case.variants):
        said = f"names {len(case.variants)} for {len(case.names)} mechanisms; join one for each by +"
        yield Reason(code="variants_uneven", field="mechanism_variant", said=said)
    if BASELINE in case.names and len(case.names) > 1:
        said = f"is {case.fields.mechanism!r}; the baseline is what is without every other"
        yield Reason(code="baseline_combined", field="mechanism", said=said)
    yield from (_unregistered(case, part) for part in case.parts if part.mechanism is None)


def _unregistered(case: Case, part: CombinedPart) -> Reason:
    known = sorted(variant for name, variant in case.context.registry.mechanisms if name == part.name)
    said = f"is {part.variant!r}; registered for {part.name}: {', '.join(known) or 'none'}"
    code = "baseline_variant" if part.name == BASELINE else "variant_unregistered"
    return Reason(code=code, field="mechanism_variant", said=said + suggestion(part.variant, known))


@rule(
    2,
    "quality_eval_status in accepted set",
    why="a word outside the vocabulary means what its author wants",
    leaves="unsupported",
    hard=True,
    of_fields=True,
)
def status_accepted(case: Case) -> Iterator[Reason]:
    """The declared status is a word of its vocabulary; none is declared just as well."""
    yield from (reason for reason in case.malformed if reason.field == STATUS)


@rule(
    4,
    "speculative_decoding requires draft fields",
    why="without draft model and acceptance rate a speed-up cannot be repeated",
    leaves="artifact_only",
    hard=True,
)
def draft_given(case: Case) -> Iterator[Reason]:
    """Speculative decoding names its draft model and its acceptance rate, which may be 0."""
    if not set(case.names) & set(SPECULATIVE):
        return
    for code, name in (("draft_missing", "draft_model_id"), ("acceptance_missing", "speculative_acceptance_rate")):
        if case.values[name] is None:
            yield Reason(code=code, field=name, said="is not given; speculative decoding has one")


@rule(
    5,
    "support_status is claimed",
    why="a row that claims nothing would pass without having been judged",
    leaves="unsupported",
    hard=True,
)
def tier_claimed(case: Case) -> Iterator[Reason]:
    """A row that is judged says what it claims: there is no default that somebody could have meant."""
    if case.names and case.fields.support_status is None:
        yield Reason(code="tier_missing", field="support_status", said="is not given; a claim names its tier")


@rule(
    6,
    "declaration agrees with the registry",
    why="one name with two meanings certifies the wrong one",
    leaves="unsupported",
    hard=True,
)
def agrees_with_registry(case: Case) -> Iterator[Reason]:
    """Method and scope are those of the entry; fields of a mechanism stand only where it is declared."""
    if case.registered and case.compresses:
        yield from _other_than_registered(case, "compression_method", "method", "method_other")
        yield from _other_than_registered(case, "compression_scope", "scope", "scope_other")
    if not set(case.names) & set(COMPRESSION):
        stated = [name for name in ("compression_method", "compression_scope") if case.values[name] is not None]
        stated += ["compression_ratio"] if case.fields.compression_ratio not in (None, 1.0) else []
        for name in stated:
            said = f"is {case.values[name]!r}, yet no compression is declared"
            yield Reason(code="compression_undeclared", field=name, said=said)
    if not set(case.names) & set(SPECULATIVE):
        for name in DRAFT_FIELDS:
            if case.values[name] is not None:
                said = f"is {case.values[name]!r}, yet no speculative decoding is declared"
                yield Reason(code="draft_undeclared", field=name, said=said)


def _other_than_registered(case: Case, field: str, key: str, code: str) -> Iterator[Reason]:
    """A row that says nothing says nothing wrong."""
    stated, registered = case.values[field], {getattr(m, key) for m in case.of_kind("compression")}
    if stated is not None and set(stated.split("+")) != registered:
        yield Reason(code=code, field=field, said=f"is {stated!r}; registered is {'+'.join(sorted(registered))!r}")


@rule(
    7,
    "quality_eval_id registered",
    why="an eval that nobody defined has no margin to be inside of",
    leaves="artifact_only",
    hard=True,
)
def eval_registered(case: Case) -> Iterator[Reason]:
    """An eval that is named is registered, at every tier."""
    named, registry = case.fields.quality_eval_id, case.context.registry
    if named is not None and registry.eval(named) is None:
        said = f"is {named!r}; registered: {', '.join(sorted(registry.evals)) or 'none'}"
        yield Reason(code="eval_unregistered", field="quality_eval_id", said=said + suggestion(named, registry.evals))


@rule(8, "own record overstates nothing", why="a row cannot vouch for itself", leaves="unsupported", hard=True)
def record_overstates_nothing(case: Case) -> Iterator[Reason]:
    """What a published row says of itself is not more than what is found here: it was forged, or is stale."""
    named = case.fields.quality_eval_id
    found = {
        "mechanism_eval_registered": case.registered,
        "quality_eval_registered": case.context.registry.eval(named) is not None,
    }
    for flag, about in FLAGS.items():
        if (case.row.embedded or {}).get(flag) is True and not found[flag]:
            said = f"is true in the row's own record, yet {about} {case.values[about]!r} is not registered"
            yield Reason(code="embedded_overstates", field=flag, said=said)


@rule(16, "mechanism is not deprecated", why="an entry that was given up is kept for old rows only", leaves="gated")
def not_deprecated(case: Case) -> Iterator[Reason]:
    """The registered entry is still in use."""
    for part in case.parts:
        if part.mechanism and part.mechanism.deprecated:
            said = f"{part.mechanism.name} is deprecated: {part.mechanism.deprecated}"
            yield Reason(code="mechanism_deprecated", field="mechanism_variant", said=said)


@rule(
    20,
    "class names its implementation",
    why="unlike methods under one name would share one certification",
    leaves="reviewed_preview",
)
def class_names_implementation(case: Case) -> Iterator[Reason]:
    """An umbrella's name stands for some implementation, which the notes name."""
    for part in case.parts:
        if part.mechanism and part.mechanism.umbrella and case.fields.mechanism_notes is None:
            said = f"is not given; {part.mechanism.name} is a class, say which implementation it was"
            yield Reason(code="umbrella_unnamed", field="mechanism_notes", said=said)
