"""What was read or kept less of, held against what was declared: patterns of attention, latent caches, evictions.

None of them is a codec, so nothing that watches codecs sees them run. A row says in `pattern` what really ran, with its
settings, and in `read_bytes` what a step reads of the contexts that `kv_values` counts. Two things are easily taken for
one another: a pattern that reads a tenth of a cache stores all of it, and an eviction or a latent cache stores less and
reads all that is left.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.gate.cases import Case
from kvlab.gate.evidence.faults import READS_ALL
from kvlab.gate.reasons import Reason
from kvlab.gate.registry import Mechanism

ATTENTION = "attention"


def patterned(case: Case) -> tuple[Mechanism, ...]:
    """Its registered mechanisms that read or keep less by a pattern."""
    return tuple(one for one in case.of_kind("compression") if one.patterns)


def stores_all(case: Case) -> bool:
    """Whether all that it declares acts on reading: its cache is as large as ever."""
    return bool(patterned(case)) and all(one.patterns and one.scope == ATTENTION for one in case.of_kind("compression"))


def kind_of(pattern: str) -> str:
    """``block_sparse`` of ``block_sparse:block=32,top_k=4``."""
    return pattern.partition(":")[0]


def undeclared_pattern(case: Case) -> Iterator[Reason]:
    """A pattern ran beside mechanisms none of which has one: their evidence would be of something else."""
    ran = case.get("pattern")
    declared = patterned(case) or not (case.registered or not case.names)  # of an unregistered one nothing is known
    if ran not in READS_ALL and not declared:
        said = f"is {ran!r}, and nothing that reads or keeps less is declared"
        yield Reason(code="undeclared_pattern", field="pattern", said=said)


def pattern_ran(case: Case) -> Iterator[Reason]:
    """The declared pattern ran, and no other."""
    ran, allowed = case.get("pattern"), {name for one in patterned(case) for name in one.patterns}
    if not allowed or ran is None:
        return
    if ran in READS_ALL:
        said = f"is {ran!r}: all was kept and read; declared is {case.get('mechanism_variant')!r}"
        yield Reason(code="pattern_absent", field="pattern", said=said)
    elif kind_of(ran) not in allowed:
        said = f"is {ran!r}; {case.get('mechanism_variant')} runs {', '.join(sorted(allowed))}"
        yield Reason(code="pattern_other", field="pattern", said=said)


def read_is_not_stored(case: Case) -> Iterator[Reason]:
    """Of a pattern that acts on reading alone, the bytes that are stored are not fewer than those of every token."""
    held, native = case.held_bits, case.native_bits
    if stores_all(case) and held is not None and native and held < native:
        said = f"are {held:.4g} bits per value; every token is stored, in {native}: these are the bytes of a step"
        yield Reason(code="read_as_stored", field="kv_bytes", said=said)


def pattern_observed(case: Case) -> Iterator[Reason]:
    """What ran was looked at, and what a step reads was counted where that is what is claimed."""
    if patterned(case) and case.get("pattern") is None:
        said = "is not given; record what attention read by, or what was kept, with its settings"
        yield Reason(code="pattern_unobserved", field="pattern", said=said)
    if stores_all(case) and case.get("read_bytes") is None:
        said = "is not given; what acts on reading has to say what a step reads"
        yield Reason(code="read_missing", field="read_bytes", said=said)


def spares_reading(case: Case) -> Iterator[Reason]:
    """A step reads fewer bytes than the uncompressed cache has."""
    read, values, native = case.get("read_bytes"), case.get("kv_values"), case.native_bits
    if stores_all(case) and None not in (read, values, native) and 8 * read >= native * values:
        said = f"is {read}; the uncompressed cache has {native * values // 8} bytes"
        yield Reason(code="nothing_spared", field="read_bytes", said=said)
