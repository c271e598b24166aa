"""Whether a row may rest on a piece of evidence: everything that is wrong with it, each thing by its own code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType

from kvlab.core.errors import suggestion
from kvlab.core.recipe import IDENTITY
from kvlab.core.records import CANARY_MIN
from kvlab.core.testimony import Pool
from kvlab.gate.evidence.measures import Measure, carried, change_of, rate_of
from kvlab.gate.evidence.record import Evidence, EvidenceError, Observed, parse
from kvlab.gate.reasons import Reason
from kvlab.gate.registry import Eval, Mechanism, Metric, Registry

BASELINE_RECIPE = IDENTITY.recipe_id  # a baseline codes nothing; anything else would flatter what is held against it
NO_CODEC = (None, "", "identity")
NO_SPECULATION = (None, "", "none")
READS_ALL = (None, "", "none", "full")  # how a row says that nothing was left out
COUNTED = (*Pool.model_fields, "capacity_tokens")  # by an engine of its own cache; nothing else vouches for them
OWN_HARNESS = "kvlab"
UNWITNESSED = "evidence_imported"  # a loss may be shown all the same
NARROWEST = 1.9  # standard errors; at 95 % an interval is about four wide, at a rate of 0 or 1 half of that
NOTHING = 1e-6  # what rounding may leave of a number that is 0
ROUNDED = 1e-3  # relative; rows show rounded numbers
OTHER_TEXT = 0.05  # relative; a codec that stores outliers takes other bytes for the texts of another eval


def problems(
    evidence: object,
    row: Mapping,
    registry: Registry,
    current: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Reason]:
    """Everything that keeps a row from resting on this evidence; parameters as in `status`, but one evidence.

    Evidence that is malformed, not finite or tampered with is not looked at any further: what else it says is not
    known to be what was measured.

    Returns
    -------
    list of Reason
    """
    if evidence is None:
        return [Reason(code="evidence_missing", field="evidence", said="is not there")]
    try:
        evidence = parse(evidence)
    except EvidenceError as error:
        return [Reason(code="evidence_malformed", field="evidence", said=str(error))]
    broken = [*_not_finite(evidence)] or [*_tampered(evidence)]
    if broken:
        return broken
    entry = registry.eval(evidence.quality_eval_id)
    if entry is None:
        known = suggestion(evidence.quality_eval_id, registry.evals)
        said = f"is {evidence.quality_eval_id!r}, which is not registered{known}"
        return [Reason(code="evidence_unregistered_eval", field="quality_eval_id", said=said)]
    return [
        *_other_version(evidence, entry),
        *_other_identity(evidence, row, entry),
        *_stale(evidence, row, current),
        *_outside_band(evidence, entry),
        *_baseline(evidence, entry),
        *_metrics(evidence, entry),
        *(_ran(evidence, row, entry, registry) if evidence.imported is None else _unseen(evidence, row)),
    ]


def _ran(evidence: Evidence, row: Mapping, entry: Eval, registry: Registry) -> Iterator[Reason]:
    """What was seen of the cache, held against the row."""
    yield from _codec(evidence, row, registry)
    yield from _pages(evidence, row, registry)
    yield from _canary(evidence, entry)
    yield from _other_pattern(evidence, row)
    yield from _contradictions(evidence, row, entry)


def _unseen(evidence: Evidence, row: Mapping) -> Iterator[Reason]:
    """Of evidence that was imported nothing was seen, so there is nothing to hold the row against but the metrics.

    It says of itself that nobody looked, and so it cannot show that little is lost: a codec that never ran, or a cache
    that nobody read, loses nothing. That much is lost it can show (`kvlab.gate.evidence.derived`).
    """
    names = ", ".join(evidence.imported.unobserved)
    said = f"is from {evidence.imported.harness}, which says nothing of {names}"
    yield Reason(code=UNWITNESSED, field="imported", said=said)
    yield from _other_numbers(row, {key: measure.value for key, measure in evidence.metrics.items()})


def _measures(evidence: Evidence) -> Iterator[tuple[str, Measure]]:
    """Every measure with where it stands."""
    for part in ("metrics", "baseline", "paired"):
        for key, measure in getattr(evidence, part).items():
            yield f"{part}.{key}", measure


def _not_finite(evidence: Evidence) -> Iterator[Reason]:
    for place, measure in _measures(evidence):
        for name, value in measure:
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None and not math.isfinite(one):
                    yield Reason(code="evidence_not_finite", field=f"{place}.{name}", said=f"is {one}")


def _tampered(evidence: Evidence) -> Iterator[Reason]:
    if evidence.content_id() != evidence.evidence_id:
        said = f"is {evidence.evidence_id!r}, the content's is {evidence.content_id()!r}"
        yield Reason(code="evidence_tampered", field="evidence_id", said=said)


def _other_version(evidence: Evidence, entry: Eval) -> Iterator[Reason]:
    if evidence.version != entry.version:
        said = f"is {evidence.version!r}, registered is {entry.version!r}"
        yield Reason(code="evidence_other_version", field="version", said=said)


# A row that does not say one of these could borrow any evidence, so nothing said is equal to nothing alone.
IDENTIFYING = {
    "model": "model",
    "engine": "engine",
    "recipe_id": "recipe",
    "context_tokens": "context",
    "dtype": "dtype",
    "protocol": "protocol",
    "device": "device",
    "calibration": "calibration",
}
AGEING = {"model_hash": "model", "corpus_hash": "corpus", "code": "code"}


def _other_identity(evidence: Evidence, row: Mapping, entry: Eval) -> Iterator[Reason]:
    for name, what in IDENTIFYING.items():
        measured, claimed = getattr(evidence.identity, name), row.get(name)
        if measured != claimed and not (name == "context_tokens" and entry.own_contexts):
            said = f"is {claimed!r} in the row and {measured!r} in the evidence"
            yield Reason(code=f"evidence_other_{what}", field=name, said=said)


def _stale(evidence: Evidence, row: Mapping, current: Mapping[str, Mapping[str, str]] | None) -> Iterator[Reason]:
    now = None if current is None else current.get(evidence.identity.model)
    if current is not None and now is None:
        said = f"is {evidence.identity.model!r}; known are {', '.join(sorted(current)) or 'none'}"
        yield Reason(code="evidence_stale_unknown", field="model", said=said)
    for name, what in AGEING.items():
        measured = getattr(evidence.identity, name)
        for where, other in (("in the row", row.get(name)), ("now", (now or {}).get(name))):
            if other is not None and other != measured:
                said = f"is {other!r} {where} and {measured!r} in the evidence"
                yield Reason(code=f"evidence_stale_{what}", field=name, said=said)
                break


def _outside_band(evidence: Evidence, entry: Eval) -> Iterator[Reason]:
    if not entry.covers(evidence.identity.context_tokens):
        band = "{} to {}".format(*entry.band)
        said = f"is {evidence.identity.context_tokens}, {entry.quality_eval_id} speaks for {band}"
        yield Reason(code="evidence_outside_band", field="context_tokens", said=said)


def _baseline(evidence: Evidence, entry: Eval) -> Iterator[Reason]:
    """The baseline codes nothing and is otherwise the variant's twin."""
    identity, recipe = evidence.baseline_identity, evidence.baseline_recipe_id
    if identity is None or recipe is None or not evidence.baseline:
        if entry.baseline_required:
            yield Reason(code="evidence_no_baseline", field="baseline", said="is not there, or not what it was run on")
        return
    for name, found in (("baseline_recipe_id", recipe), ("baseline_identity.recipe_id", identity.recipe_id)):
        if found != BASELINE_RECIPE:
            said = f"is {found!r}, that of no codec is {BASELINE_RECIPE!r}"
            yield Reason(code="evidence_other_baseline", field=name, said=said)
    for name, value in identity:
        variants = getattr(evidence.identity, name)
        if name != "recipe_id" and value != variants:
            said = f"is {value!r} for the baseline and {variants!r} for the variant"
            yield Reason(code="evidence_other_baseline", field=f"baseline_identity.{name}", said=said)


def _metrics(evidence: Evidence, entry: Eval) -> Iterator[Reason]:
    """Every registered metric is there, can be, has the interval that its items give, and its parts belong together."""
    parts = ("metrics", "baseline", "paired") if entry.baseline_required or evidence.baseline else ("metrics",)
    known = {metric.key for metric in entry.metrics}
    for part in ("metrics", "baseline", "paired"):
        for key in sorted(getattr(evidence, part).keys() - known):
            said = f"is no metric of {entry.quality_eval_id}; registered are {', '.join(sorted(known))}"
            yield Reason(code="evidence_metric_unknown", field=f"{part}.{key}", said=said)
    for metric in entry.metrics:
        there = [part for part in ("metrics", "baseline", "paired") if metric.key in getattr(evidence, part)]
        for part in there:
            yield from _measure(metric, f"{part}.{metric.key}", getattr(evidence, part)[metric.key], part == "paired")
        missing = [part for part in parts if part not in there]
        for part in missing:
            yield Reason(code="evidence_metric_missing", field=f"{part}.{metric.key}", said="is not there")
        if not missing and len(parts) > 1:
            yield from _unpaired(evidence, metric)


def _measure(metric: Metric, place: str, measure: Measure, change: bool) -> Iterator[Reason]:
    """What is wrong with one measure: a value that cannot be, an interval that no items give."""
    low, high = metric.range
    if change and low is not None and high is not None:
        low, high = low - high, high - low
    elif change:
        low = high = None
    if (low is not None and measure.value < low - NOTHING) or (high is not None and measure.value > high + NOTHING):
        said = f"is {measure.value:.6g}; a {metric.key} is {_between(low, high)}"
        yield Reason(code="evidence_range", field=place, said=said)
        return
    if metric.rate:
        yield from _recounted(place, measure, change)
        return
    outside = not measure.low <= measure.value <= measure.high
    narrow = measure.high - measure.low < NARROWEST * measure.se
    if outside or narrow or measure.se < 0 or measure.n < 2:
        said = f"is {measure.value} in [{measure.low}, {measure.high}], se {measure.se}, n {measure.n}"
        yield Reason(code="evidence_interval", field=place, said=said)
    elif not _belong(measure):
        most = len(carried(measure.n))
        said = f"are not up to {most} bounds, as {measure.n} items carry, that contain the interval and widen"
        yield Reason(code="evidence_ends", field=f"{place}.highs", said=said)


def _between(low: float | None, high: float | None) -> str:
    return f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"


def _recounted(place: str, measure: Measure, change: bool) -> Iterator[Reason]:
    """A rate's interval is the one that its counts give."""
    if measure.n < 2 or (change and None in (measure.gained, measure.lost)):
        said = "is over fewer than 2 items, or does not say what items gained and lost: its interval cannot be made"
        yield Reason(code="evidence_interval", field=place, said=said)
        return
    if change and min(measure.gained, measure.lost) < 0:
        said = f"has gained {measure.gained:g} and lost {measure.lost:g}; neither is below 0"
        yield Reason(code="evidence_interval", field=place, said=said)
        return
    made = (
        change_of(measure.gained, measure.lost, measure.n) if change else rate_of(measure.value * measure.n, measure.n)
    )
    for name in ("value", "low", "high", "se"):
        stated, counted = getattr(measure, name), getattr(made, name)
        if not math.isclose(stated, counted, rel_tol=1e-6, abs_tol=NOTHING):
            yield Reason(
                code="evidence_interval",
                field=f"{place}.{name}",
                said=f"is {stated:.6g}; {measure.n} items with these counts give {counted:.6g}",
            )


def _belong(measure: Measure) -> bool:
    """Whether the bounds are as many as the items can carry at most, contain the interval, and widen."""
    lows, highs = measure.lows, measure.highs
    if len(lows) != len(highs) or len(lows) > len(carried(measure.n)):
        return False
    if not lows:
        return True
    inside = lows[0] <= measure.low and measure.high <= highs[0]
    return inside and all(a >= b for a, b in pairwise(lows)) and all(a <= b for a, b in pairwise(highs))


def _unpaired(evidence: Evidence, metric: Metric) -> Iterator[Reason]:
    key = metric.key
    value, baseline, paired = evidence.metrics[key], evidence.baseline[key], evidence.paired[key]
    if not value.n == baseline.n == paired.n:
        said = f"is over {paired.n} items, the variant over {value.n}, the baseline over {baseline.n}"
        yield Reason(code="evidence_unpaired", field=f"paired.{key}", said=said)
    size = max(abs(value.value), abs(baseline.value))
    if not math.isclose(paired.value, value.value - baseline.value, rel_tol=1e-6, abs_tol=1e-9 * max(1.0, size)):
        said = f"is {paired.value}, but variant minus baseline is {value.value - baseline.value}"
        yield Reason(code="evidence_unpaired", field=f"paired.{key}", said=said)
    hits = baseline.value * baseline.n
    if paired.lost is not None and paired.lost > hits + NOTHING:
        said = f"lost {paired.lost:g} of the {hits:g} that the baseline answers"
        yield Reason(code="evidence_unpaired", field=f"paired.{key}.lost", said=said)
    if paired.gained is not None and paired.gained > baseline.n - hits + NOTHING:
        said = f"gained {paired.gained:g} of the {baseline.n - hits:g} that the baseline misses"
        yield Reason(code="evidence_unpaired", field=f"paired.{key}.gained", said=said)
    if metric.untouched is not None and abs(baseline.value - metric.untouched) > NOTHING:
        said = f"is {baseline.value:.6g}; of the engine as it is, held against itself, it is {metric.untouched:g}"
        yield Reason(code="evidence_other_baseline", field=f"baseline.{key}", said=said)


def _codec(evidence: Evidence, row: Mapping, registry: Registry) -> Iterator[Reason]:
    """The mechanism's codec ran: one that did not costs no quality, and says nothing about one that does."""
    observed, mechanisms = evidence.observed, mechanisms_of(row, registry)
    if observed.codec in NO_CODEC:
        yield from _idle(observed, mechanisms, _cache_dtypes(registry.mechanism("baseline", "none")))
        return
    if observed.fires == 0 or observed.fires != observed.expected_fires:
        said = f"is {observed.fires} for {observed.codec}, expected {observed.expected_fires}"
        yield Reason(code="evidence_codec_idle", field="observed.fires", said=said)
    named = {codec for mechanism in mechanisms if mechanism for codec in mechanism.codecs}
    if None not in mechanisms and observed.codec not in named:
        said = f"is {observed.codec!r}, the row's mechanism names {', '.join(sorted(named)) or 'none'}"
        yield Reason(code="evidence_other_codec", field="observed.codec", said=said)


def _pages(evidence: Evidence, row: Mapping, registry: Registry) -> Iterator[Reason]:
    """Of a mechanism that is an engine's own pages: which backend ran, and what the engine says that they hold."""
    found = evidence.observed
    backends = {name for mechanism in mechanisms_of(row, registry) if mechanism for name in mechanism.backends}
    if not backends:
        return
    for name in ("codec", "backend", "pool", "served"):
        if getattr(found, name) in NO_CODEC:
            said = "is not there; the mechanism is what the engine's own pages hold"
            yield Reason(code="evidence_pages", field=f"observed.{name}", said=said)
    if found.backend is not None and found.backend not in backends:
        said = f"is {found.backend!r}, the mechanism's pages are read by {', '.join(sorted(backends))}"
        yield Reason(code="evidence_other_backend", field="observed.backend", said=said)
    for name, told in found.served or ():
        if told != (measured := getattr(evidence.identity, name)):
            said = f"is {told!r} by the engine's own account, and {measured!r} in the evidence's identity"
            yield Reason(code="evidence_other_served", field=f"observed.served.{name}", said=said)


def _canary(evidence: Evidence, entry: Eval) -> Iterator[Reason]:
    """The logits hang on what is stored or read: else nothing that is stored or left out costs any quality.

    Another harness looks at it by itself, on what it asks; it need not say so.
    """
    observed = evidence.observed
    found, coded = observed.canary_kl, observed.codec not in NO_CODEC or observed.pattern not in READS_ALL
    if found is None:
        if coded and entry.harness == OWN_HARNESS:
            ran = "codec" if observed.codec not in NO_CODEC else "pattern"
            yield Reason(code="evidence_canary", field="observed.canary_kl", said=f"is not there; a {ran} ran")
    elif not (found >= CANARY_MIN if coded else found > 0):
        least = f"at least {CANARY_MIN:g}" if coded else "more than 0"
        yield Reason(code="evidence_canary", field="observed.canary_kl", said=f"is {found!r}; expected is {least}")


def _other_pattern(evidence: Evidence, row: Mapping) -> Iterator[Reason]:
    """A recipe says nothing of patterns, so a loss could be borrowed from one that leaves out less."""
    measured, claimed = (None if one in READS_ALL else one for one in (evidence.observed.pattern, row.get("pattern")))
    if measured != claimed:
        said = f"is {claimed!r} in the row and {measured!r} in the evidence"
        yield Reason(code="evidence_other_pattern", field="pattern", said=said)


def _idle(observed: Observed, mechanisms: list[Mechanism | None], plain: set[str]) -> Iterator[Reason]:
    """No codec of ours ran: then the engine has to store something that `plain` caches do not."""
    for mechanism in filter(None, mechanisms):
        codecs, dtypes = set(mechanism.codecs) - set(NO_CODEC), _cache_dtypes(mechanism) - plain
        if not mechanism.lossless and (codecs or dtypes) and observed.kv_cache_dtype not in dtypes:
            expected = " or ".join([*sorted(codecs), *(f"a cache of {dtype}" for dtype in sorted(dtypes))])
            said = f"is none and the cache holds {observed.kv_cache_dtype}; expected is {expected}"
            yield Reason(code="evidence_codec_idle", field="observed.codec", said=said)


def _cache_dtypes(mechanism: Mechanism | None) -> set[str]:
    return set(mechanism.kv_cache_dtypes) if mechanism else set()


def _contradictions(evidence: Evidence, row: Mapping, entry: Eval) -> Iterator[Reason]:
    """What a row says of itself that its evidence saw otherwise, or of counts not at all; what it leaves out is none.

    Contexts of other lengths take other bytes for a value: what is stored once for all tokens is shared by others, as
    are the tokens that each request keeps exact, and a window reads as much of a long one as of a short one. What a
    row's steps read is that of its own eval's contexts.
    """
    observed, own = evidence.observed, evidence.quality_eval_id == row.get("quality_eval_id")
    for name in ("kv_cache_dtype", "cache_class", "codec", "backend"):
        seen, said_so = getattr(observed, name) or None, row.get(name) or None
        if said_so is not None and seen != said_so:
            yield _contradiction(name, said_so, seen)
    numbers = {key: measure.value for key, measure in evidence.metrics.items()}
    ran, claimed = (
        None if one in NO_SPECULATION else one for one in (observed.spec_decoding, row.get("spec_decoding"))
    )
    if claimed is not None and ran != claimed:
        yield _contradiction("spec_decoding", claimed, ran)
    numbers |= dict.fromkeys(COUNTED) | ({"read_bytes": observed.read_bytes} if own else {})
    if observed.pool is not None:
        numbers |= observed.pool.model_dump() | {"capacity_tokens": observed.pool.capacity_tokens}
    alike = own or observed.pool is None or not observed.pool.exact_bytes
    if observed.kv_values > 0 and not entry.own_contexts and alike:
        numbers["bits_per_value"] = observed.bits_per_value
    yield from _other_numbers(row, numbers, {"bits_per_value": ROUNDED if own else OTHER_TEXT})


def _other_numbers(
    row: Mapping, numbers: Mapping, rounded: Mapping[str, float] = MappingProxyType({})
) -> Iterator[Reason]:
    """Numbers that a row shows otherwise than they were seen, by more than rows round."""
    for name, seen in numbers.items():
        shown, far = row.get(name), rounded.get(name, ROUNDED)
        if shown is not None and (seen is None or not math.isclose(shown, seen, rel_tol=far, abs_tol=1e-9)):
            yield _contradiction(name, shown, seen)


def _contradiction(name: str, shown: object, seen: object) -> Reason:
    said = f"is {shown!r} in the row and {seen!r} in the evidence"
    return Reason(code="evidence_contradicts_row", field=name, said=said)


def mechanisms_of(row: Mapping, registry: Registry) -> list[Mechanism | None]:
    """The row's registered mechanisms, ``a+b`` being two; None for one that is not registered."""
    names = str(row.get("mechanism") or "").split("+")
    variants = str(row.get("mechanism_variant") or "none").split("+")
    if len(names) != len(variants):
        return [None]
    return [registry.mechanism(*pair) for pair in zip(names, variants, strict=True)]
