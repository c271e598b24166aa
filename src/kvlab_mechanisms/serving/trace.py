"""What a service is asked: when, how long the prompt and the answer, and what beginning it shares with others.

A trace is columns. Its own format is JSON Lines, one request a line, in the order of arrival:
``{"t": 0.25, "prompt": 312, "output": 64, "prefix": 7, "shared": 256}``; `prefix` and `shared` may be left out.
Traces that others published are read as they lie: Azure's CSV and Mooncake's JSON Lines.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvlab.core.errors import UserError, suggestion
from kvlab.core.records import atomic

KEYS = ("t", "prompt", "output", "prefix", "shared")
NEEDED = KEYS[:3]
MOST_LINE = 1 << 16  # characters
MOST_REQUESTS = 20_000_000
MOST_TOKENS = 10_000_000  # of a prompt or an answer
MOST_SECONDS = 10 * 366 * 86400.0
UNITS = {"seconds": 1, "milliseconds": 1000}
MOST_PREFIX = (1 << 63) - 1
NONE = -1
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
BLOCK = 512  # tokens that one of Mooncake's hash_ids stands for
MOST_BLOCKS = 20_000


class TraceError(UserError):
    """A line of a trace is wrong; the message names it."""

    code = "trace"


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival.

    Parameters
    ----------
    t : ndarray float64 [n]
        Seconds since the trace began.
    prompt, output : ndarray int64 [n]
        Tokens; at least 1 of each.
    prefix : ndarray int64 [n]
        Names the beginning that a prompt shares with others of the same name; -1 where it shares none.
    shared : ndarray int64 [n]
        Tokens of that beginning, at most those of the prompt.
    """

    t: NDArray
    prompt: NDArray
    output: NDArray
    prefix: NDArray
    shared: NDArray

    def __len__(self) -> int:
        return len(self.t)

    @property
    def rate(self) -> float:
        """Requests per second between the first and the last."""
        span = float(self.t[-1] - self.t[0])
        return (len(self) - 1) / span if span > 0 else math.inf

    def at_rate(self, rate: float) -> Trace:
        """The same requests at another mean rate: time is stretched, burstiness is kept.

        Raises
        ------
        TraceError
            The last one would come later than any trace may last, or at no time at all.
        """
        factor = self.rate / rate
        last = float(self.t[-1]) * factor
        if not last <= MOST_SECONDS:
            enough = 1.01 * self.rate * float(self.t[-1]) / MOST_SECONDS  # so that its three digits are taken
            least = f"at least {enough:.3g} requests per second"
            raise TraceError(
                f"rate {rate:g}: the last request would come at {last:g} s; allowed: {least}", code="trace.rate"
            )
        return Trace(self.t * factor, self.prompt, self.output, self.prefix, self.shared)


def columns(rows: Iterable[tuple[float, int, int, int, int]]) -> Trace:
    """A trace of rows `(t, prompt, output, prefix, shared)`."""
    found = list(rows)
    t = np.array([row[0] for row in found], float)
    return Trace(t, *(np.array([row[at] for row in found], np.int64) for at in range(1, 5)))


def read(path: Path | str) -> Trace:
    """A trace in kvlab's own format.

    Raises
    ------
    TraceError
        A line that is no such request, a time before the one above it, or more than is taken.
    """
    return checked_order(columns(_request(line, where) for line, where in lines(path)), path)


def lines(path: Path | str) -> Iterator[tuple[str, str]]:
    """The lines of a file that are not empty, each with its name for errors."""
    try:
        with open(path, encoding="utf-8") as file:
            number = 0
            while line := file.readline(MOST_LINE + 1):
                number += 1
                where = f"{path}, line {number}"
                if len(line) > MOST_LINE:
                    raise TraceError(
                        f"{where} is too long; allowed: at most {MOST_LINE} characters", code="trace.long-line"
                    )
                if number > MOST_REQUESTS:
                    raise TraceError(
                        f"{path} has more than {MOST_REQUESTS} lines; allowed: at most so many",
                        code="trace.too-many-lines",
                    )
                if line.strip():
                    yield line, where
    except UnicodeDecodeError:
        raise TraceError(f"{path} is no text in UTF-8, so it is no trace", code="trace.not-text") from None
    except OSError as error:
        raise TraceError(f"cannot read {str(path)!r}: {error.strerror}") from None


def checked_order(trace: Trace, path: Path | str) -> Trace:
    """The trace; `TraceError` if it is empty or goes back in time."""
    if not len(trace):
        raise TraceError(f"{path} holds no request; allowed: at least 1", code="trace.empty")
    back = np.flatnonzero(np.diff(trace.t) < 0)
    if len(back):
        at = int(back[0]) + 1
        late = f"request {at + 1} comes at {trace.t[at]:g} s, after one at {trace.t[at - 1]:g} s"
        raise TraceError(f"{path}, {late}; allowed: in the order of arrival", code="trace.order")
    return trace


def whole(value: object, name: str, where: str, least: int, most: int) -> int:
    """A whole number within limits, or a `TraceError`."""
    if type(value) is not int or not least <= value <= most:
        raise TraceError(
            f"{where}: {name} {value!r:.40}; allowed: a whole number from {least} to {most}", code="trace.number"
        )
    return value


def time(value: object, where: str, name: str = "t", unit: str = "seconds") -> float:
    """Seconds within limits, of a number of `unit`, or a `TraceError`."""
    most = MOST_SECONDS * UNITS[unit]
    if type(value) not in (int, float) or not 0 <= value <= most:  # before dividing: an int may be above any float
        raise TraceError(f"{where}: {name} {value!r:.40}; allowed: {unit} from 0 to {most:g}", code="trace.time")
    return value / UNITS[unit]


def as_object(line: str, where: str) -> dict:
    """The object of a line of JSON; `TraceError` where it is none, or gives a key twice."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise TraceError(f"{where} gives a key twice; give it once", code="trace.key-twice")
        return found

    try:
        found = json.loads(line, object_pairs_hook=once)
    except (ValueError, RecursionError):
        raise TraceError(f"{where} is not JSON: {line.strip()[:40]!r}", code="trace.not-json") from None
    if not isinstance(found, dict):
        raise TraceError(f"{where} is no object of JSON: {line.strip()[:40]!r}", code="trace.no-object")
    return found


def _request(line: str, where: str) -> tuple[float, int, int, int, int]:
    found = as_object(line, where)
    for key in found:
        if key not in KEYS:
            allowed = ", ".join(KEYS) + suggestion(key, KEYS)
            raise TraceError(f"{where}: key {key!r:.40} is not known; allowed: {allowed}", code="trace.unknown-key")
    for key in NEEDED:
        if key not in found:
            raise TraceError(f"{where} has no {key!r}; needed: {', '.join(NEEDED)}", code="trace.missing-key")
    prompt = whole(found["prompt"], "prompt", where, 1, MOST_TOKENS)
    output = whole(found["output"], "output", where, 1, MOST_TOKENS)
    prefix = whole(found.get("prefix", NONE), "prefix", where, NONE, MOST_PREFIX)
    shared = whole(found.get("shared", 0), "shared", where, 0, prompt)
    if (prefix == NONE) != (shared == 0):
        raise TraceError(
            f"{where}: prefix {prefix} with shared {shared}; a prefix has tokens, and tokens a prefix",
            code="trace.prefix",
        )
    return time(found["t"], where), prompt, output, prefix, shared


def write(trace: Trace, path: Path | str) -> None:
    """Write a trace in kvlab's own format, whole or not at all."""
    with atomic(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for row in zip(*(getattr(trace, key).tolist() for key in KEYS), strict=True):
            found = dict(zip(KEYS, row, strict=True))
            if found["prefix"] == NONE:
                del found["prefix"], found["shared"]
            file.write(json.dumps(found) + "\n")


# What others published.


def read_any(path: Path | str) -> Trace:
    """A trace in any format that is known, told by its first line."""
    first = next((line for line, _ in lines(path)), "")
    if first.lstrip("\ufeff").strip().startswith(AZURE[0]):
        return checked_order(columns(_azure(path)), path)
    if first.lstrip().startswith("{") and "hash_ids" in as_object(first, f"{path}, line 1"):
        return checked_order(columns(_mooncake(path)), path)
    return read(path)


def _azure(path: Path | str) -> Iterator[tuple[float, int, int, int, int]]:
    """Azure's LLM inference traces (Patel et al. 2024, Splitwise, ISCA): TIMESTAMP, ContextTokens, GeneratedTokens.

    An answer of no tokens, of which the trace of 2024 has some, is taken as one of 1: its prompt was read.
    """
    begun = None
    for line, where in lines(path):
        cells = [cell.strip() for cell in next(csv.reader([line.lstrip("\ufeff").strip()]))]
        if begun is None and tuple(cells) == AZURE:
            continue
        if len(cells) != len(AZURE):
            raise TraceError(f"{where} has {len(cells)} cells; allowed: {', '.join(AZURE)}", code="trace.cells")
        at = _moment(cells[0], where)
        begun = at if begun is None else begun
        prompt, output = (_digits(cell, name, where) for cell, name in zip(cells[1:], AZURE[1:], strict=True))
        yield time(max(at - begun, 0.0), where), max(prompt, 1), max(output, 1), NONE, 0


def _moment(text: str, where: str) -> float:
    """Seconds of a date and time; a seventh digit of the second, which Azure writes, is kept."""
    whole, _, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        return datetime.fromisoformat(f"{whole[:19]}+00:00").timestamp() + float(f"0.{digits or 0}")
    except ValueError:
        raise TraceError(
            f"{where}: {AZURE[0]} {text!r:.40}; allowed: such as 2023-11-16 18:15:46.6805900", code="trace.time"
        ) from None


def _digits(text: str, name: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise TraceError(
            f"{where}: {name} {text!r:.40}; allowed: a whole number from 0 to {MOST_TOKENS}", code="trace.number"
        )
    return whole(int(text[:12]), name, where, 0, MOST_TOKENS)


def _mooncake(path: Path | str) -> Iterator[tuple[float, int, int, int, int]]:
    """The traces of Mooncake (Qin et al. 2025, FAST): milliseconds, lengths, and the hash of each block of 512 tokens.

    A hash stands for its block and all before it. A request's prefix is the longest that an earlier request had too,
    so the first one of a kind has none.
    """
    seen: set[int] = set()
    for line, where in lines(path):
        found = as_object(line, where)
        if missing := [key for key in MOONCAKE if key not in found]:
            raise TraceError(f"{where} has no {missing[0]!r}; needed: {', '.join(MOONCAKE)}", code="trace.missing-key")
        prompt = whole(found["input_length"], "input_length", where, 1, MOST_TOKENS)
        output = whole(found["output_length"], "output_length", where, 0, MOST_TOKENS)
        hashes = found["hash_ids"]
        if not isinstance(hashes, list) or len(hashes) > MOST_BLOCKS:
            raise TraceError(
                f"{where}: hash_ids; allowed: a list of at most {MOST_BLOCKS} whole numbers", code="trace.hash-ids"
            )
        for one in hashes:
            whole(one, "hash_ids", where, 0, MOST_PREFIX)
        known = 0
        while known < len(hashes) and hashes[known] in seen:
            known += 1
        seen.update(hashes)
        shared = min(known * BLOCK, prompt)
        at = time(found["timestamp"], where, "timestamp", "milliseconds")
        yield at, prompt, max(output, 1), hashes[known - 1] if known else NONE, shared
