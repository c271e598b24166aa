"""What a row counts, among itself: rules 11 and 22.

Two things are easily taken for one another: a pattern that reads a tenth of a cache stores all of it, and an eviction
or a latent cache stores less and reads all that is left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from kvlab.gate.cases import Case
from kvlab.gate.reasons import Reason
from kvlab.gate.rules.criterion import rule

ROUNDED = 1e-2  # relative; rows show rounded numbers
ROUNDED_RATIO = 5e-3  # absolute; a ratio is given to two digits
BAND = re.compile(r"([0-9]+)([km]?)(?:\s*-\s*([0-9]+)([km]?))?(?: tokens)?")
KILO = 1.024  # a k is 1000 or 1024
SCALES = {"": (1, 1), "k": (1000, 1024), "m": (1000**2, 1024**2)}  # both are meant by a k
EXACT = ("exact_bytes", "exact_requests")
"""Of tokens that are read exact beside the blocks, where there are any."""
PAGES = ("block_tokens", "block_bytes", "block_values", "cache_blocks", "cache_memory_bytes", "capacity_tokens")
"""What a row says of the engine's own cache, each by the engine's own count."""


# --------------------------------------------------------------------- 11: numbers agree


@rule(
    11,
    "numbers agree with one another",
    why="a ratio without its denominator can be any ratio",
    leaves="unsupported",
    hard=True,
)
def numbers_agree(case: Case) -> Iterator[Reason]:
    """Bits per value, ratio, context band and capacity follow from what was counted."""
    held, shown, ratio = case.held_bits, case.fields.bits_per_value, case.fields.compression_ratio
    if held is not None and shown is not None and not math.isclose(held, shown, rel_tol=ROUNDED):
        said = f"is {shown:.6g}; {case.fields.kv_bytes} bytes of {case.fields.kv_values} values are {held:.6g}"
        yield Reason(code="bits_other", field="bits_per_value", said=said)
    bits = shown if held is None else held
    if ratio is not None and bits is not None and case.native_bits:
        found = bits / case.native_bits
        if not math.isclose(ratio, found, rel_tol=ROUNDED, abs_tol=ROUNDED_RATIO):
            said = f"is {ratio:.6g}; {bits:.6g} of {case.native_bits} bits are {found:.6g}"
            yield Reason(code="ratio_other", field="compression_ratio", said=said)
    yield from _other_pages(case)
    yield from _outside_band(case)
    yield from _read_as_stored(case)


def _other_pages(case: Case) -> Iterator[Reason]:
    """The bytes are no fewer than the pages', and what fits are the engine's own blocks, which fill its memory.

    Tokens that are read exact lie beside the blocks in both.
    """
    tokens, size, values, blocks, memory, capacity = (case.values[name] for name in PAGES)
    exact, requests = (case.values[name] or 0 for name in EXACT)
    held, stands_for = case.held_bits, case.fields.kv_values
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
    tokens, band = case.fields.context_tokens, band_of(case.fields.context_band)
    if tokens is None or case.fields.context_band is None:
        return
    if band is None:
        said = f"is {case.fields.context_band!r}; allowed: one length as in 32k, or two as in 24k-32k"
        yield Reason(code="band_other", field="context_band", said=said)
        return
    if not (band[0] <= tokens <= band[1] and 2 * band[0] > tokens / KILO and band[1] <= tokens * KILO):
        said = f"is {case.fields.context_band!r}, {band[0]} to {band[1]} tokens; a context of {tokens} speaks for more"
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


def _read_as_stored(case: Case) -> Iterator[Reason]:
    """Of a pattern that acts on reading alone, the bytes that are stored are not fewer than those of every token."""
    held, native = case.held_bits, case.native_bits
    if case.stores_all and held is not None and native and held < native:
        said = f"are {held:.4g} bits per value; every token is stored, in {native}: these are the bytes of a step"
        yield Reason(code="read_as_stored", field="kv_bytes", said=said)


# --------------------------------------------------------------------- 22: compression saves bytes


@rule(22, "compression saves bytes", why="side information can outweigh what the codes save", leaves="reviewed_preview")
def saves_bytes(case: Case) -> Iterator[Reason]:
    """A compressed cache is smaller than the uncompressed one, everything counted."""
    if case.stores_all:
        yield from _nothing_spared(case)
    elif case.compresses and case.held_bits is not None and case.native_bits and case.held_bits >= case.native_bits:
        said = f"are {case.held_bits:.4g} bits per value, not fewer than the {case.native_bits} of {case.fields.dtype}"
        yield Reason(code="nothing_saved", field="kv_bytes", said=said)


def _nothing_spared(case: Case) -> Iterator[Reason]:
    """A step reads fewer bytes than the uncompressed cache has."""
    read, values, native = case.fields.read_bytes, case.fields.kv_values, case.native_bits
    if None not in (read, values, native) and 8 * read >= native * values:
        said = f"is {read}; the uncompressed cache has {native * values // 8} bytes"
        yield Reason(code="nothing_spared", field="read_bytes", said=said)
