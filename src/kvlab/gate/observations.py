"""What really ran, held against what was declared; each function finds one kind of contradiction.

A row that declares nothing, or the baseline, must have been observed to change nothing: the declaration defaults to
harmless, so only the observation can find a lossy run that nobody declared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from kvlab.gate import read_checks
from kvlab.gate.cases import NONE, Case
from kvlab.gate.reasons import Reason
from kvlab.gate.registry.faults import NATIVE_DTYPES

REQUESTED = "auto"  # a request, no observation: the engine resolves it by the checkpoint
IDENTITY = "identity"
# in the names of cache classes that drop or round
LOSSY_CACHE = re.compile("quant|hqq|sink|evict|sliding", re.IGNORECASE)
ROUNDED = 1e-2  # relative; rows show rounded numbers
ROUNDED_RATIO = 5e-3  # absolute; a ratio is given to two digits
BAND = re.compile(r"([0-9]+)([km]?)(?:\s*-\s*([0-9]+)([km]?))?(?: tokens)?")
KILO = 1.024  # a k is 1000 or 1024
SCALES = {"": (1, 1), "k": (1000, 1024), "m": (1000**2, 1024**2)}  # both are meant by a k


# ------------------------------------------------------------------------- what ran was declared


def ran_declared(case: Case) -> Iterator[Reason]:
    """Nothing lossy ran that was not declared."""
    # a compression that is not registered is declared too: its fault is another
    if not case.compresses and all(name in ("baseline", "speculative_decoding") for name in case.names):
        yield from _undeclared_compression(case)
    ran = case.get("spec_decoding")
    if ran not in NONE and "speculative_decoding" not in case.names:
        yield _undeclared("undeclared_speculation", "spec_decoding", f"is {ran!r}")


def _undeclared_compression(case: Case) -> Iterator[Reason]:
    dtype, codec, cache = case.get("kv_cache_dtype"), case.get("codec"), case.get("cache_class")
    if dtype not in (None, REQUESTED, *NATIVE_DTYPES):
        yield _undeclared("undeclared_dtype", "kv_cache_dtype", f"is {dtype!r}")
    if codec not in (*NONE, IDENTITY):
        yield _undeclared("undeclared_codec", "codec", f"is {codec!r}")
    elif codec in NONE and case.get("fires"):
        yield _undeclared("undeclared_fires", "fires", f"is {case.get('fires')} of a codec without a name")
    if cache is not None and LOSSY_CACHE.search(cache):
        yield _undeclared("undeclared_cache", "cache_class", f"is {cache!r}")
    held, native = case.held_bits, case.native_bits
    if held is not None and native is not None and held < native * (1 - ROUNDED):
        said = f"are {held:.4g} bits per value, fewer than the {native} of {case.get('dtype')}"
        yield _undeclared("undeclared_bytes", "kv_bytes", said)


def _undeclared(code: str, field: str, said: str) -> Reason:
    return Reason(code=code, field=field, said=f"{said}, and nothing of the kind is declared")


# ------------------------------------------------------------------------- what was declared ran


def declared_ran(case: Case) -> Iterator[Reason]:
    """What was observed is what the registered entry allows, and it did run."""
    if case.registered and case.compresses:
        yield from _other_storage(case)
        yield from _other_backend(case)
        yield from _idle(case)
        yield from _part_idle(case)
    fires, expected = case.get("fires"), case.get("expected_fires")
    if fires and expected is not None and fires != expected:
        yield Reason(code="fires_other", field="fires", said=f"is {fires}; expected {expected}")
    if case.registered and case.speculates:
        yield from _other_speculation(case)


def _dtypes(case: Case) -> set[str]:
    return {dtype for mechanism in case.of_kind("compression") for dtype in mechanism.kv_cache_dtypes}


def _codecs(case: Case) -> set[str]:
    return {codec for mechanism in case.of_kind("compression") for codec in mechanism.codecs}


def _backends(case: Case) -> set[str]:
    """The classes of attention that have to run; none where no entry of an engine's own pages is declared."""
    return {backend for mechanism in case.of_kind("compression") for backend in mechanism.backends}


def _other_storage(case: Case) -> Iterator[Reason]:
    """A codec that runs beside the engine's cache leaves its dtype as it is, so there the native ones are allowed."""
    dtype, codec = case.get("kv_cache_dtype"), case.get("codec")
    beside = codec in _codecs(case) and not _backends(case)
    allowed = _dtypes(case) | (set(NATIVE_DTYPES) if beside else set())
    if dtype not in (None, REQUESTED, *allowed):
        said = f"is {dtype!r}; {case.get('mechanism_variant')} stores {', '.join(sorted(allowed))}"
        yield Reason(code="observed_dtype_other", field="kv_cache_dtype", said=said)
    if codec not in (*NONE, IDENTITY, *_codecs(case)):
        said = f"is {codec!r}; {case.get('mechanism_variant')} runs {', '.join(sorted(_codecs(case))) or 'none'}"
        yield Reason(code="observed_codec_other", field="codec", said=said)


def _other_backend(case: Case) -> Iterator[Reason]:
    ran, allowed = case.get("backend"), _backends(case)
    if allowed and ran not in (None, *allowed):
        said = f"is {ran!r}; {case.get('mechanism_variant')} is read by {', '.join(sorted(allowed))}"
        yield Reason(code="backend_other", field="backend", said=said)


def _idle(case: Case) -> Iterator[Reason]:
    codec, codecs, dtype = case.get("codec"), _codecs(case), case.get("kv_cache_dtype")
    coded = dtype in _dtypes(case) - set(NATIVE_DTYPES)
    if codec in codecs:
        if case.get("fires") == 0:
            yield Reason(code="codec_idle", field="fires", said=f"is 0: {codec} never ran")
    elif codecs and not coded and (codec == IDENTITY or dtype in NATIVE_DTYPES):
        said = f"is {codec!r} and the cache holds {dtype}; declared is {case.get('mechanism_variant')!r}"
        yield Reason(code="codec_absent", field="codec", said=said)


def _part_idle(case: Case) -> Iterator[Reason]:
    """Of several compressions each was seen to run: one that did says nothing of the others."""
    parts = case.of_kind("compression")
    for one in parts if len(parts) > 1 else ():
        kind = (case.get("pattern") or "").partition(":")[0]
        coded = case.get("kv_cache_dtype") in set(one.kv_cache_dtypes) - set(NATIVE_DTYPES)
        if not (case.get("codec") in one.codecs or coded or kind in one.patterns):
            said = f"of {one.name} was seen to run: codec {case.get('codec')!r}, cache {case.get('kv_cache_dtype')!r}"
            yield Reason(code="part_absent", field="mechanism", said=f"nothing {said}, pattern {case.get('pattern')!r}")


def _other_speculation(case: Case) -> Iterator[Reason]:
    ran, declared = case.get("spec_decoding"), [m.variant for m in case.of_kind("speculative")]
    if ran is not None and ran in NONE:
        yield Reason(code="speculation_idle", field="spec_decoding", said=f"is {ran!r}; declared is {declared[0]!r}")
    elif ran is not None and ran not in declared:
        yield Reason(code="speculation_other", field="spec_decoding", said=f"is {ran!r}; declared is {declared[0]!r}")


# ------------------------------------------------------------------------- numbers among themselves


def numbers_agree(case: Case) -> Iterator[Reason]:
    """Bits per value, ratio, context band and capacity follow from what was counted."""
    held, shown, ratio = case.held_bits, case.get("bits_per_value"), case.get("compression_ratio")
    if held is not None and shown is not None and not math.isclose(held, shown, rel_tol=ROUNDED):
        said = f"is {shown:.6g}; {case.get('kv_bytes')} bytes of {case.get('kv_values')} values are {held:.6g}"
        yield Reason(code="bits_other", field="bits_per_value", said=said)
    bits = shown if held is None else held
    if ratio is not None and bits is not None and case.native_bits:
        found = bits / case.native_bits
        if not math.isclose(ratio, found, rel_tol=ROUNDED, abs_tol=ROUNDED_RATIO):
            said = f"is {ratio:.6g}; {bits:.6g} of {case.native_bits} bits are {found:.6g}"
            yield Reason(code="ratio_other", field="compression_ratio", said=said)
    yield from _other_pages(case)
    yield from _outside_band(case)


EXACT = ("exact_bytes", "exact_requests")
"""Of tokens that are read exact beside the blocks, where there are any."""
PAGES = ("block_tokens", "block_bytes", "block_values", "cache_blocks", "cache_memory_bytes", "capacity_tokens")
"""What a row says of the engine's own cache, each by the engine's own count."""


def _other_pages(case: Case) -> Iterator[Reason]:
    """The bytes are no fewer than the pages', and what fits are the engine's own blocks, which fill its memory.

    Tokens that are read exact lie beside the blocks in both.
    """
    tokens, size, values, blocks, memory, capacity = (case.get(name) for name in PAGES)
    exact, requests = (case.get(name) or 0 for name in EXACT)
    held, stands_for = case.held_bits, case.get("kv_values")
    least = 8 * (size / values + exact / (stands_for or math.inf)) if size and values else None
    if None not in (held, least) and held < least * (1 - ROUNDED):
        said = f"are {held:.6g} bits per value; the engine's pages take {least:.6g}"
        yield Reason(code="page_other", field="kv_bytes", said=said)
    if memory is not None:
        memory -= exact * requests
    if None not in (tokens, blocks, capacity) and capacity != tokens * blocks:
        said = f"is {capacity}; {blocks} blocks of {tokens} tokens are {tokens * blocks}"
        yield Reason(code="capacity_other", field="capacity_tokens", said=said)
    if None not in (size, blocks, memory) and size * blocks > memory:
        said = f"is {blocks}; so many blocks of {size} bytes exceed the {memory} that were given"
        yield Reason(code="capacity_other", field="cache_blocks", said=said)
    if None not in (size, blocks, memory) and size * (blocks + 1) < memory * (1 - ROUNDED):
        said = f"is {blocks}; of {size} bytes, {memory // max(size, 1)} blocks fit into the {memory} that were given"
        yield Reason(code="capacity_other", field="cache_blocks", said=said)


def _outside_band(case: Case) -> Iterator[Reason]:
    """A context speaks for itself and for shorter ones of more than half its length."""
    tokens, band = case.get("context_tokens"), band_of(case.get("context_band"))
    if tokens is None or case.get("context_band") is None:
        return
    if band is None:
        said = f"is {case.get('context_band')!r}; allowed: one length as in 32k, or two as in 24k-32k"
        yield Reason(code="band_other", field="context_band", said=said)
        return
    if not (band[0] <= tokens <= band[1] and 2 * band[0] > tokens / KILO and band[1] <= tokens * KILO):
        said = f"is {case.get('context_band')!r}, {band[0]} to {band[1]} tokens; a context of {tokens} speaks for more"
        yield Reason(code="band_other", field="context_band", said=f"{said} than {tokens // 2} up to {tokens}")


def band_of(name: str | None) -> tuple[int, int] | None:
    """Least and most tokens of a context band.

    Parameters
    ----------
    name : str or None
        ``8k-32k``, or one length as in ``32k``, which stands for more than half of it. A k is 1000 or 1024: the first
        where a range begins, the second where it ends.

    Returns
    -------
    tuple of int, or None when the name is something else
    """
    found = BAND.fullmatch((name or "").lower())
    if found is None:
        return None
    parts = (found.group(1, 2), found.group(3, 4))
    lengths = [(int(number), SCALES[unit]) for number, unit in parts if number is not None]
    (low, (scale, _)), (high, (_, most)) = lengths[0], lengths[-1]
    return (low * scale if len(lengths) == 2 else high * most // 2 + 1), high * most


# ------------------------------------------------------------------------- enough was observed


def observed(case: Case) -> Iterator[Reason]:
    """What the engine stored, and what a codec did, was looked at; otherwise nothing above can find anything."""
    if not case.registered:
        return
    if case.get("kv_cache_dtype") in (None, REQUESTED):
        said = f"is {case.get('kv_cache_dtype')!r}; record what the engine's cache really holds"
        yield Reason(code="observation_missing", field="kv_cache_dtype", said=said)
    for name in ("backend", *PAGES) if _backends(case) else ():
        if case.get(name) is None:
            yield Reason(code="pages_unobserved", field=name, said="is not given; ask the running engine for it")
    if case.get("codec") not in (*NONE, IDENTITY) and None in (case.get("fires"), case.get("expected_fires")):
        yield Reason(
            code="fires_missing", field="fires", said="or expected_fires is not given; count the codec's calls"
        )
    if case.speculates and case.get("spec_decoding") is None:
        said = "is not given; record what the engine was started with"
        yield Reason(code="speculation_unobserved", field="spec_decoding", said=said)


def saves_bytes(case: Case) -> Iterator[Reason]:
    """A compressed cache is smaller than the uncompressed one, everything counted."""
    if read_checks.stores_all(case):
        return  # what such a mechanism spares is reading: `read_checks.spares_reading`
    if case.compresses and case.held_bits is not None and case.native_bits and case.held_bits >= case.native_bits:
        said = f"are {case.held_bits:.4g} bits per value, not fewer than the {case.native_bits} of {case.get('dtype')}"
        yield Reason(code="nothing_saved", field="kv_bytes", said=said)
