"""Every number of a row, held against its evidence: what follows from none of it is refused. Rules 12 and 17.

A row is typed by somebody, evidence is written by what measured. So nothing that evidence can say is believed because
a row says it. Times and memory no evidence vouches for; they are not judged (`RowColumn.judged`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvlab.core.recipe import IDENTITY, SPAN_OF
from kvlab.gate.cases import BASELINE, DTYPE_BITS, Case
from kvlab.gate.catalogue.columns import QUANTITIES
from kvlab.gate.catalogue.values import Value
from kvlab.gate.evidence import Evidence
from kvlab.gate.evidence.faults import NO_CODEC, ROUNDED
from kvlab.gate.reasons import Reason
from kvlab.gate.registry.faults import NATIVE_DTYPES
from kvlab.gate.rules import counts
from kvlab.gate.rules.criterion import rule

STORED_BITS = DTYPE_BITS | dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), 8)
LENGTHS = ("context_tokens", "context_band")
EXACT = ("kv_bytes", "kv_values", "read_bytes", "fires", "expected_fires")  # counts, which nobody rounds


@rule(
    12,
    "numbers follow from the evidence",
    why="a number that is typed beside good evidence would be certified with it",
    leaves="unsupported",
    hard=True,
)
def numbers_derived(case: Case) -> Iterator[Reason]:
    """What a row says is what its evidence says, and that was counted of so many items of one run."""
    yield from _typed(case)
    yield from _baseline_coded(case)
    yield from _apart(case)
    yield from counts.impossible(case)
    yield from case.others


def _typed(case: Case) -> Iterator[Reason]:
    """What a row with evidence says is what its evidence says."""
    if case.cited is None:
        return
    found = _derived(case)
    for name in QUANTITIES:
        stated, counted = case.values[name], found.get(name)
        if stated is None or _same(name, stated, counted):
            continue
        if counted is None:
            said = f"is {stated!r}; no evidence of this row says what it is"
            yield Reason(code="quantity_unvouched", field=name, said=said)
        else:
            yield Reason(code="quantity_other", field=name, said=f"is {stated!r}; the evidence gives {counted!r}")


def _derived(case: Case) -> dict[str, Value]:
    """Every quantity that the evidence of a row gives: what was counted by the one that it cites, metrics by all."""
    cited = case.cited
    found: dict[str, Value] = {}
    for piece in (*case.evidence, cited):
        found |= {name: measure.value for name, measure in piece.metrics.items() if name in QUANTITIES}
    return found | _counted(cited)


def _counted(evidence: Evidence) -> dict[str, Value]:
    if evidence.imported is not None:  # nobody looked
        return {}
    seen, native = evidence.observed, DTYPE_BITS.get(evidence.identity.dtype)
    bits = seen.bits_per_value
    found = {name: getattr(seen, name) for name in EXACT}
    found |= {"bits": seen.bits, "stored_span": seen.span, "bits_per_value": bits}
    found |= {"compression_ratio": bits / native if bits is not None and native else None}
    if seen.pool is not None:
        found |= seen.pool.model_dump() | {"capacity_tokens": seen.pool.capacity_tokens}
    return found


def _same(name: str, stated: Value, counted: Value) -> bool:
    if counted is None or isinstance(stated, str) or name in EXACT:
        return stated == counted
    return math.isclose(stated, counted, rel_tol=ROUNDED, abs_tol=1e-9)


def _baseline_coded(case: Case) -> Iterator[Reason]:
    """A baseline codes nothing."""
    if set(case.names) != {BASELINE}:
        return
    recipe = case.fields.recipe_id
    if recipe not in (None, IDENTITY.recipe_id):
        said = f"is {recipe!r}; that of no codec is {IDENTITY.recipe_id!r}"
        yield Reason(code="baseline_recipe", field="recipe_id", said=said)


ALIKE = ("kv_cache_dtype", "cache_class", "codec", "backend", "pattern", "bits", "span", "spec_decoding")
"""What was observed of a variant, whatever it was asked."""


def _apart(case: Case) -> Iterator[Reason]:
    """The pieces of one run agree on how many variants it tested and on what ran, and what ran can have stored that."""
    runs: dict[str, list[Evidence]] = {}
    for piece in case.evidence:
        runs.setdefault(piece.family.run, []).append(piece)
        yield from _cannot_store(piece)
    for run, pieces in runs.items():
        if len(counts := {piece.family.tested for piece in pieces}) > 1:
            said = f"of run {run!r} is {' and '.join(map(str, sorted(counts)))}"
            yield Reason(code="evidence_other_family", field="family.tested", said=said)
        for name in ALIKE:
            if len(seen := {getattr(piece.observed, name) for piece in pieces}) > 1:
                said = f"is {' and '.join(sorted(map(repr, seen)))} in evidence of run {run!r}"
                yield Reason(code="evidence_apart", field=f"observed.{name}", said=said)


def _cannot_store(evidence: Evidence) -> Iterator[Reason]:
    """A span that the protocol does not store, and fewer bits than the engine's own dtype has.

    What stores every token as its engine does may count the contexts alone under any protocol.
    """
    seen, protocol = evidence.observed, evidence.identity.protocol
    otherwise = seen.codec not in NO_CODEC or seen.kv_cache_dtype not in NATIVE_DTYPES
    if otherwise and seen.span is not None and SPAN_OF.get(protocol, seen.span) != seen.span:
        said = f"is {seen.span!r}; under {protocol!r} it is the {SPAN_OF[protocol]}"
        yield Reason(code="evidence_apart", field="observed.span", said=said)
    whole = STORED_BITS.get(seen.kv_cache_dtype)
    bits, plain = seen.bits_per_value, seen.codec in NO_CODEC and not seen.pattern
    if plain and whole and bits is not None and bits < whole * (1 - ROUNDED):
        said = f"are {bits:.4g} bits for each value of a cache that holds {seen.kv_cache_dtype}, of {whole}"
        yield Reason(code="evidence_apart", field="observed.kv_bytes", said=said)


@rule(17, "baseline shows its own quality", why="every other row is held against it", leaves="gated")
def baseline_shown(case: Case) -> Iterator[Reason]:
    """What a baseline states rests on evidence too: everything else is held against it."""
    if set(case.names) != {BASELINE} or case.evidence:
        return
    for name in (*LENGTHS, *QUANTITIES):
        if case.values[name] is not None:
            said = f"is {case.values[name]!r}; attach the evidence, or leave it out"
            yield Reason(code="baseline_unshown", field=name, said=said)
