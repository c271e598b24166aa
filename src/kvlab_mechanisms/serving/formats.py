"""Traces that others published, read as they lie: Azure's CSV and Mooncake's JSON Lines."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from kvlab_mechanisms.serving import trace
from kvlab_mechanisms.serving.trace import MOST_TOKENS, NONE, Trace, TraceError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
BLOCK = 512  # tokens that one of Mooncake's hash_ids stands for
MOST_BLOCKS = 20_000


def read_any(path: Path | str) -> Trace:
    """A trace in any format that is known, told by its first line."""
    first = next((line for line, _ in trace.lines(path)), "")
    if first.lstrip("\ufeff").strip().startswith(AZURE[0]):
        return read_azure(path)
    if first.lstrip().startswith("{") and "hash_ids" in trace.as_object(first, f"{path}, line 1"):
        return read_mooncake(path)
    return trace.read(path)


def read_azure(path: Path | str) -> Trace:
    """Azure's LLM inference traces (Patel et al. 2024, Splitwise, ISCA): TIMESTAMP, ContextTokens, GeneratedTokens.

    An answer of no tokens, of which the trace of 2024 has some, is taken as one of 1: its prompt was read.
    """
    return trace.checked_order(trace.columns(_azure(path)), path)


def _azure(path: Path | str) -> Iterator[tuple[float, int, int, int, int]]:
    begun = None
    for line, where in trace.lines(path):
        cells = [cell.strip() for cell in next(csv.reader([line.lstrip("\ufeff").strip()]))]
        if begun is None and tuple(cells) == AZURE:
            continue
        if len(cells) != len(AZURE):
            raise TraceError(f"{where} has {len(cells)} cells; allowed: {', '.join(AZURE)}")
        at = _moment(cells[0], where)
        begun = at if begun is None else begun
        prompt, output = (_digits(cell, name, where) for cell, name in zip(cells[1:], AZURE[1:], strict=True))
        yield trace.time(max(at - begun, 0.0), where), max(prompt, 1), max(output, 1), NONE, 0


def _moment(text: str, where: str) -> float:
    """Seconds of a date and time; a seventh digit of the second, which Azure writes, is kept."""
    whole, _, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        return datetime.fromisoformat(f"{whole[:19]}+00:00").timestamp() + float(f"0.{digits or 0}")
    except ValueError:
        raise TraceError(f"{where}: {AZURE[0]} {text!r:.40}; allowed: such as 2023-11-16 18:15:46.6805900") from None


def _digits(text: str, name: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise TraceError(f"{where}: {name} {text!r:.40}; allowed: a whole number from 0 to {MOST_TOKENS}")
    return trace.whole(int(text[:12]), name, where, 0, MOST_TOKENS)


def read_mooncake(path: Path | str) -> Trace:
    """The traces of Mooncake (Qin et al. 2025, FAST): milliseconds, lengths, and the hash of each block of 512 tokens.

    A hash stands for its block and all before it. A request's prefix is the longest that an earlier request had too,
    so the first one of a kind has none.
    """
    return trace.checked_order(trace.columns(_mooncake(path)), path)


def _mooncake(path: Path | str) -> Iterator[tuple[float, int, int, int, int]]:
    seen: set[int] = set()
    for line, where in trace.lines(path):
        found = trace.as_object(line, where)
        if missing := [key for key in MOONCAKE if key not in found]:
            raise TraceError(f"{where} has no {missing[0]!r}; needed: {', '.join(MOONCAKE)}")
        prompt = trace.whole(found["input_length"], "input_length", where, 1, MOST_TOKENS)
        output = trace.whole(found["output_length"], "output_length", where, 0, MOST_TOKENS)
        hashes = found["hash_ids"]
        if not isinstance(hashes, list) or len(hashes) > MOST_BLOCKS:
            raise TraceError(f"{where}: hash_ids; allowed: a list of at most {MOST_BLOCKS} whole numbers")
        for one in hashes:
            trace.whole(one, "hash_ids", where, 0, trace.MOST_PREFIX)
        known = 0
        while known < len(hashes) and hashes[known] in seen:
            known += 1
        seen.update(hashes)
        shared = min(known * BLOCK, prompt)
        at = trace.time(found["timestamp"], where, "timestamp", "milliseconds")
        yield at, prompt, max(output, 1), hashes[known - 1] if known else NONE, shared
