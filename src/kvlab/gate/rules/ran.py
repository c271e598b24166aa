"""What really ran, held against what was declared: rules 9, 10 and 21.

A row that declares nothing, or the baseline, must have been observed to change nothing: the declaration defaults to
harmless, so only the observation can find a lossy run that nobody declared. Patterns of attention, latent caches and
evictions are no codecs, so nothing that watches codecs sees them run: a row says in `pattern` what ran, with settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvlab.gate.cases import NONE, Case
from kvlab.gate.evidence.faults import READS_ALL
from kvlab.gate.reasons import Reason
from kvlab.gate.registry.faults import NATIVE_DTYPES
from kvlab.gate.rules.counted import PAGES, ROUNDED
from kvlab.gate.rules.criterion import rule

REQUESTED = "auto"  # a request, no observation: the engine resolves it by the checkpoint
IDENTITY = "identity"
# in the names of cache classes that drop or round
LOSSY_CACHE = re.compile("quant|hqq|sink|evict|sliding", re.IGNORECASE)


# --------------------------------------------------------------------- 9: what ran was declared


@rule(
    9,
    "what ran was declared",
    why="a lossy run that declares nothing would be certified as the baseline",
    leaves="unsupported",
    hard=True,
)
def ran_declared(case: Case) -> Iterator[Reason]:
    """Nothing lossy ran that was not declared."""
    # a compression that is not registered is declared too: its fault is another
    if not case.compresses and all(name in ("baseline", "speculative_decoding") for name in case.names):
        yield from _undeclared_compression(case)
    ran = case.fields.spec_decoding
    if ran not in NONE and "speculative_decoding" not in case.names:
        yield _undeclared("undeclared_speculation", "spec_decoding", f"is {ran!r}")
    yield from _undeclared_pattern(case)


def _undeclared_compression(case: Case) -> Iterator[Reason]:
    dtype, codec, cache = case.fields.kv_cache_dtype, case.fields.codec, case.fields.cache_class
    if dtype not in (None, REQUESTED, *NATIVE_DTYPES):
        yield _undeclared("undeclared_dtype", "kv_cache_dtype", f"is {dtype!r}")
    if codec not in (*NONE, IDENTITY):
        yield _undeclared("undeclared_codec", "codec", f"is {codec!r}")
    elif codec in NONE and case.fields.fires:
        yield _undeclared("undeclared_fires", "fires", f"is {case.fields.fires} of a codec without a name")
    if cache is not None and LOSSY_CACHE.search(cache):
        yield _undeclared("undeclared_cache", "cache_class", f"is {cache!r}")
    held, native = case.held_bits, case.native_bits
    if held is not None and native is not None and held < native * (1 - ROUNDED):
        said = f"are {held:.4g} bits per value, fewer than the {native} of {case.fields.dtype}"
        yield _undeclared("undeclared_bytes", "kv_bytes", said)


def _undeclared_pattern(case: Case) -> Iterator[Reason]:
    """A pattern ran beside mechanisms none of which has one: their evidence would be of something else."""
    ran = case.fields.pattern
    declared = case.patterned or not (case.registered or not case.names)  # of an unregistered one nothing is known
    if ran not in READS_ALL and not declared:
        said = f"is {ran!r}, and nothing that reads or keeps less is declared"
        yield Reason(code="undeclared_pattern", field="pattern", said=said)


def _undeclared(code: str, field: str, said: str) -> Reason:
    return Reason(code=code, field=field, said=f"{said}, and nothing of the kind is declared")


# --------------------------------------------------------------------- 10: what was declared ran


@rule(10, "what was declared ran", why="a codec that never ran loses no quality", leaves="unsupported", hard=True)
def declared_ran(case: Case) -> Iterator[Reason]:
    """What was observed is what the registered entry allows, and it did run."""
    if case.registered and case.compresses:
        yield from _other_storage(case)
        yield from _other_backend(case)
        yield from _idle(case)
        yield from _part_idle(case)
    fires, expected = case.fields.fires, case.fields.expected_fires
    if fires and expected is not None and fires != expected:
        yield Reason(code="fires_other", field="fires", said=f"is {fires}; expected {expected}")
    if case.registered and case.speculates:
        yield from _other_speculation(case)
    yield from _other_pattern(case)


def _dtypes(case: Case) -> set[str]:
    return {dtype for mechanism in case.of_kind("compression") for dtype in mechanism.kv_cache_dtypes}


def _codecs(case: Case) -> set[str]:
    return {codec for mechanism in case.of_kind("compression") for codec in mechanism.codecs}


def _backends(case: Case) -> set[str]:
    """The classes of attention that have to run; none where no entry of an engine's own pages is declared."""
    return {backend for mechanism in case.of_kind("compression") for backend in mechanism.backends}


def _other_storage(case: Case) -> Iterator[Reason]:
    """A codec that runs beside the engine's cache leaves its dtype as it is, so there the native ones are allowed."""
    dtype, codec = case.fields.kv_cache_dtype, case.fields.codec
    beside = codec in _codecs(case) and not _backends(case)
    allowed = _dtypes(case) | (set(NATIVE_DTYPES) if beside else set())
    if dtype not in (None, REQUESTED, *allowed):
        said = f"is {dtype!r}; {case.fields.mechanism_variant} stores {', '.join(sorted(allowed))}"
        yield Reason(code="observed_dtype_other", field="kv_cache_dtype", said=said)
    if codec not in (*NONE, IDENTITY, *_codecs(case)):
        said = f"is {codec!r}; {case.fields.mechanism_variant} runs {', '.join(sorted(_codecs(case))) or 'none'}"
        yield Reason(code="observed_codec_other", field="codec", said=said)


def _other_backend(case: Case) -> Iterator[Reason]:
    ran, allowed = case.fields.backend, _backends(case)
    if allowed and ran not in (None, *allowed):
        said = f"is {ran!r}; {case.fields.mechanism_variant} is read by {', '.join(sorted(allowed))}"
        yield Reason(code="backend_other", field="backend", said=said)


def _idle(case: Case) -> Iterator[Reason]:
    codec, codecs, dtype = case.fields.codec, _codecs(case), case.fields.kv_cache_dtype
    coded = dtype in _dtypes(case) - set(NATIVE_DTYPES)
    if codec in codecs:
        if case.fields.fires == 0:
            yield Reason(code="codec_idle", field="fires", said=f"is 0: {codec} never ran")
    elif codecs and not coded and (codec == IDENTITY or dtype in NATIVE_DTYPES):
        said = f"is {codec!r} and the cache holds {dtype}; declared is {case.fields.mechanism_variant!r}"
        yield Reason(code="codec_absent", field="codec", said=said)


def _part_idle(case: Case) -> Iterator[Reason]:
    """Of several compressions each was seen to run: one that did says nothing of the others."""
    parts = case.of_kind("compression")
    for one in parts if len(parts) > 1 else ():
        kind = _kind_of(case.fields.pattern or "")
        coded = case.fields.kv_cache_dtype in set(one.kv_cache_dtypes) - set(NATIVE_DTYPES)
        if not (case.fields.codec in one.codecs or coded or kind in one.patterns):
            said = f"of {one.name} was seen to run: codec {case.fields.codec!r}, cache {case.fields.kv_cache_dtype!r}"
            yield Reason(code="part_absent", field="mechanism", said=f"nothing {said}, pattern {case.fields.pattern!r}")


def _other_speculation(case: Case) -> Iterator[Reason]:
    ran, declared = case.fields.spec_decoding, [m.variant for m in case.of_kind("speculative")]
    if ran is not None and ran in NONE:
        yield Reason(code="speculation_idle", field="spec_decoding", said=f"is {ran!r}; declared is {declared[0]!r}")
    elif ran is not None and ran not in declared:
        yield Reason(code="speculation_other", field="spec_decoding", said=f"is {ran!r}; declared is {declared[0]!r}")


def _other_pattern(case: Case) -> Iterator[Reason]:
    """The declared pattern ran, and no other."""
    ran, allowed = case.fields.pattern, {name for one in case.patterned for name in one.patterns}
    if not allowed or ran is None:
        return
    if ran in READS_ALL:
        said = f"is {ran!r}: all was kept and read; declared is {case.fields.mechanism_variant!r}"
        yield Reason(code="pattern_absent", field="pattern", said=said)
    elif _kind_of(ran) not in allowed:
        said = f"is {ran!r}; {case.fields.mechanism_variant} runs {', '.join(sorted(allowed))}"
        yield Reason(code="pattern_other", field="pattern", said=said)


def _kind_of(pattern: str) -> str:
    """``block_sparse`` of ``block_sparse:block=32,top_k=4``."""
    return pattern.partition(":")[0]


# --------------------------------------------------------------------- 21: what ran was observed


@rule(
    21, "what ran was observed", why="what nobody looked at cannot be told from the baseline", leaves="reviewed_preview"
)
def observed(case: Case) -> Iterator[Reason]:
    """What the engine stored, and what a codec did, was looked at; otherwise nothing above can find anything."""
    yield from _storage_unobserved(case)
    yield from _pattern_unobserved(case)


def _storage_unobserved(case: Case) -> Iterator[Reason]:
    if not case.registered:
        return
    if case.fields.kv_cache_dtype in (None, REQUESTED):
        said = f"is {case.fields.kv_cache_dtype!r}; record what the engine's cache really holds"
        yield Reason(code="observation_missing", field="kv_cache_dtype", said=said)
    for name in ("backend", *PAGES) if _backends(case) else ():
        if case.values[name] is None:
            yield Reason(code="pages_unobserved", field=name, said="is not given; ask the running engine for it")
    if case.fields.codec not in (*NONE, IDENTITY) and None in (case.fields.fires, case.fields.expected_fires):
        yield Reason(
            code="fires_missing", field="fires", said="or expected_fires is not given; count the codec's calls"
        )
    if case.speculates and case.fields.spec_decoding is None:
        said = "is not given; record what the engine was started with"
        yield Reason(code="speculation_unobserved", field="spec_decoding", said=said)


def _pattern_unobserved(case: Case) -> Iterator[Reason]:
    """What ran was looked at, and what a step reads was counted where that is what is claimed."""
    if case.patterned and case.fields.pattern is None:
        said = "is not given; record what attention read by, or what was kept, with its settings"
        yield Reason(code="pattern_unobserved", field="pattern", said=said)
    if case.stores_all and case.fields.read_bytes is None:
        said = "is not given; what acts on reading has to say what a step reads"
        yield Reason(code="read_missing", field="read_bytes", said=said)
