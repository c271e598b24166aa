"""Plain data (texts, numbers, lists, mappings) held to what any parameters may be, whatever read it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

MOST_VALUES = 20_000
MOST_DEPTH = 32
MOST_KEYS = 256  # of one mapping
MOST_ENTRIES = 64  # of one list: what is measured is every entry of one list by every entry of others
MOST_LAYERS = 1024  # of a list of layers, and of a model
MOST_CHARACTERS = 4096  # of one text
MOST_BITS = 63  # of a whole number, beside its sign
WIDEST = 100  # characters of a value in a line
SURROGATES = re.compile("[\ud800-\udfff]")


def shown(value: object) -> str:
    """A value as a line may print it: on that line, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= WIDEST else f"{text[:WIDEST]}..."


def unfit(data: Any) -> list[str]:
    """A line for each value that no parameter may have, whatever its name.

    Refused are numbers that are not finite, or of more than 64 bits, texts that are long or not UTF-8, long lists,
    lists that name a thing twice, what is of no kind that JSON has, and mappings with a key that is no text. What is
    too deep, or too much, is looked at no further: Snakemake reads params.yaml by itself, and one value may stand in
    many places.
    """
    lines: list[str] = []
    left: list[tuple[tuple, Any]] = [((), data)]
    for _ in range(MOST_VALUES):
        if not left:
            return lines
        place, value = left.pop()
        if len(place) > MOST_DEPTH:
            return [f"{'.'.join(map(str, place[:4]))}... is deeper than {MOST_DEPTH} levels; allowed: at most so many"]
        lines += (f"{_named(place)} {said}" for said in _wrong(value, place))
        left += reversed([((*place, key), entry) for key, entry in _entries(value, _most(value, place))])
    return lines if not left else [f"there are more than {MOST_VALUES} values; allowed: at most so many"]


def no_wildcard(path: str) -> str:
    """The path; `ValueError` where Snakemake would read a part of it as a wildcard, or it breaks a line."""
    wrong = re.search(r"[{}\x00-\x1f\x7f]", path)
    if wrong:
        raise ValueError(f"{shown(path)} holds {wrong[0]!r}; allowed: a path without braces and control characters")
    return path


def _most(value: Any, place: tuple) -> int:
    """How many entries a mapping or a list may have; so many are looked at."""
    if isinstance(value, dict):
        return MOST_KEYS
    return MOST_LAYERS if place and str(place[-1]).endswith("layers") else MOST_ENTRIES


def _entries(value: Any, most: int) -> list[tuple[Any, Any]]:
    """What a value holds, by key or by number."""
    if isinstance(value, dict):
        return [(key, entry) for key, entry in list(value.items())[:most] if _is_name(key)]
    return list(enumerate(value[:most])) if isinstance(value, list | tuple) else []


def _wrong(value: Any, place: tuple) -> Iterator[str]:
    """What is wrong with a value by itself."""
    if isinstance(value, dict | list | tuple):
        if len(value) > (most := _most(value, place)):
            yield f"has {len(value)} entries; allowed: at most {most}"
        if isinstance(value, dict):
            odd = (key for key in [*value][:most] if not _is_name(key))
            yield from (f"has the key {shown(key)}; allowed: a parameter's name" for key in odd)
        elif (twice := _twice(value[:most], place)) is not None:
            yield f"names {shown(twice)} twice; allowed: each once"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"is {value}; allowed: a finite number"
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        yield f"is a number of {value.bit_length()} bits; allowed: at most {MOST_BITS}, and a sign"
    elif isinstance(value, str) and len(value) > MOST_CHARACTERS:
        yield f"is a text of {len(value)} characters; allowed: at most {MOST_CHARACTERS}"
    elif isinstance(value, str) and SURROGATES.search(value):
        yield f"is {shown(value)}, which no file in UTF-8 can hold; allowed: a text that one can"
    elif not isinstance(value, str | int | float | None):
        yield f"is {value}, a {type(value).__name__}; allowed: a number, or a text, in quotes where it needs them"


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and len(key) <= MOST_CHARACTERS and not SURROGATES.search(key)


def _twice(entries: list | tuple, place: tuple) -> Any:
    """What a list names twice. One within a list may: K and V may have the same bits."""
    inner = bool(place) and isinstance(place[-1], int)
    alike = [entry for entry in entries if isinstance(entry, str) or (not inner and _is_flat(entry))]
    return next((entry for number, entry in enumerate(alike) if entry in alike[:number]), None)


def _is_flat(entry: Any) -> bool:
    """Whether this is a number, a text, or a list of such: what can be compared and shown however deep the rest is."""
    held = entry if isinstance(entry, list | tuple) else [entry]
    return len(held) <= MOST_LAYERS and all(isinstance(value, str | int | float) for value in held)


def _named(place: tuple) -> str:
    return f"parameter {'.'.join(map(str, place))!r}" if place else "the file"
