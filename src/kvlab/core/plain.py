"""Plain data (texts, numbers, lists, mappings) held to what any parameters may be, whatever read it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from typing import Any

MOST_VALUES = 20_000
MOST_DEPTH = 32
MOST_KEYS = 256  # of one mapping
MOST_ENTRIES = 64  # of one list: what is measured is every entry of one list by every entry of others
MOST_LAYERS = 1024  # of a list of layers, and of a model
MOST_CHARACTERS = 4096  # of one text
MOST_BITS = 63  # of a whole number, beside its sign
WIDEST = 100  # characters of a value in a line


def shown(value: object) -> str:
    """A value as a line may print it: on that line, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= WIDEST else f"{text[:WIDEST]}..."


def unfit(data: Any) -> list[str]:
    """A line for each value that no parameter may have.

    Refused are numbers that are not finite, or of more than 64 bits, long texts, long lists, lists that name a thing
    twice, and mappings with a key that is no text. What is too deep, or too much, is looked at no further.
    """
    walk = _Walk()
    try:
        return list(walk.lines(data, ()))
    except _TooMuchError as error:
        return [str(error)]


def no_wildcard(path: str) -> str:
    """The path; `ValueError` where Snakemake would read a part of it as a wildcard, or it breaks a line."""
    wrong = re.search(r"[{}\x00-\x1f\x7f]", path)
    if wrong:
        raise ValueError(f"{shown(path)} holds {wrong[0]!r}; allowed: a path without braces and control characters")
    return path


class _TooMuchError(Exception):
    """There is more than anybody has a use for."""


class _Walk:
    """One walk over data, in which one value may stand in many places."""

    def __init__(self) -> None:
        self.values = 0

    def lines(self, value: Any, place: tuple) -> Iterator[str]:
        """What is wrong with a value and all that it holds."""
        self.values += 1
        if self.values > MOST_VALUES:
            raise _TooMuchError(f"there are more than {MOST_VALUES} values; allowed: at most so many")
        if len(place) > MOST_DEPTH:
            name = ".".join(map(str, place[:4]))
            raise _TooMuchError(f"{name}... is deeper than {MOST_DEPTH} levels; allowed: at most so many")
        if isinstance(value, dict):
            yield from self._of_mapping(value, place)
        elif isinstance(value, list | tuple):
            yield from self._of_list(value, place)
        elif said := _of_scalar(value):
            yield f"{_named(place)} {said}"

    def _of_mapping(self, value: dict, place: tuple) -> Iterator[str]:
        yield from _too_many(value, MOST_KEYS, place)
        for key, entry in list(value.items())[:MOST_KEYS]:
            if not isinstance(key, str):
                yield f"{_named(place)} has the key {shown(key)}; allowed: a parameter's name"
            elif said := _of_scalar(key):
                yield f"a key of {_named(place)} {said}"
            else:
                yield from self.lines(entry, (*place, key))

    def _of_list(self, value: Collection, place: tuple) -> Iterator[str]:
        most = MOST_LAYERS if place and str(place[-1]).endswith("layers") else MOST_ENTRIES
        entries = list(value)[:most]
        yield from _too_many(value, most, place)
        inner = bool(place) and isinstance(place[-1], int)  # a list within one: K and V may have the same bits
        alike = [entry for entry in entries if isinstance(entry, str) or (not inner and _is_flat(entry))]
        twice = next((entry for number, entry in enumerate(alike) if entry in alike[:number]), None)
        if twice is not None:
            yield f"{_named(place)} names {shown(twice)} twice; allowed: each once"
        for number, entry in enumerate(entries):
            yield from self.lines(entry, (*place, number))


def _is_flat(entry: Any) -> bool:
    """Whether this is a number, a text, or a list of such: what can be compared and shown however deep the rest is."""
    held = entry if isinstance(entry, list | tuple) else [entry]
    return len(held) <= MOST_LAYERS and all(isinstance(value, str | int | float) for value in held)


def _too_many(value: Collection, most: int, place: tuple) -> Iterator[str]:
    if len(value) > most:
        yield f"{_named(place)} has {len(value)} entries; allowed: at most {most}"


def _of_scalar(value: Any) -> str:
    """What is wrong with a text or a number; empty where nothing is."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}; allowed: a finite number"
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"is a number of {value.bit_length()} bits; allowed: at most {MOST_BITS}, and a sign"
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        return f"is a text of {len(value)} characters; allowed: at most {MOST_CHARACTERS}"
    return ""


def _named(place: tuple) -> str:
    return f"parameter {'.'.join(map(str, place))!r}" if place else "the file"
