"""Typed access to published JSON: a number that decides a result must be there and be finite.

Fields are named as paths, for example ``per_passage[2].metrics.ppl_alt``, so that a refusal says where to look.
"""

from __future__ import annotations

import math

from kvlab.core.errors import StorageError

ABSENT = object()
LARGEST = 1e100  # squares of more do not fit a float64
MOST_TOKENS = 10**9
LEAST_PERPLEXITY = 1 - 1e-3


class FileRefused(StorageError):
    """A file of a known family that lacks, or has unusable, what decides a number."""

    code = "storage.published"


def has(data: object, path: str) -> bool:
    """Whether `path` leads somewhere; ``[]`` is the first element of a list, ``{}`` the first value of an object."""
    return _follow(data, path) is not ABSENT


def _follow(data: object, path: str) -> object:
    for part in path.replace("[]", ".[]").replace("{}", ".{}").split("."):
        if part == "":
            continue
        if part == "[]":
            data = data[0] if isinstance(data, list) and data else ABSENT
        elif part == "{}":
            data = next(iter(data.values())) if isinstance(data, dict) and data else ABSENT
        else:
            data = data.get(part, ABSENT) if isinstance(data, dict) else ABSENT
        if data is ABSENT:
            return ABSENT
    return data


def required(data: dict, key: str, where: str) -> float:
    """A finite number; bool is none.

    Raises
    ------
    Refused
        When it is missing, no number, NaN or infinite.
    """
    if not isinstance(data, dict) or key not in data:
        raise FileRefused(f"{where}.{key} is missing".lstrip("."))
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FileRefused(f"{where}.{key} is {value!r}, not a number".lstrip("."))
    if not math.isfinite(value):
        raise FileRefused(f"{where}.{key} is {value}, not a finite number".lstrip("."))
    if abs(value) > LARGEST:
        raise FileRefused(f"{where}.{key} is {value}, too large for a measurement".lstrip("."))
    return value


def optional(data: dict, key: str, where: str) -> float | None:
    """As `required`, but None when the field is missing or null."""
    return None if data.get(key) is None else required(data, key, where)


def perplexity(data: dict, key: str, where: str) -> float:
    """As `required`, and one at least (but for rounding): the exponential of a mean of -log(probability)."""
    value = required(data, key, where)
    if value < LEAST_PERPLEXITY:
        raise FileRefused(f"{where}.{key} is {value}, a perplexity is 1 at least".lstrip("."))
    return value


def count(data: dict, key: str, where: str = "") -> int | None:
    """A whole number, or None when it is not recorded."""
    value = optional(data, key, where)
    if value is None:
        return None
    if value != int(value):
        raise FileRefused(f"{where}.{key} is {value}, not a whole number".lstrip("."))
    return int(value)


def tokens(data: dict, where: str) -> int | None:
    """The number of scored tokens, one at least, or None when it is not recorded."""
    value = count(data, "n_tokens", where)
    if value is not None and not 1 <= value <= MOST_TOKENS:
        raise FileRefused(f"{where}.n_tokens is {value}, not a number of scored tokens".lstrip("."))
    return value


def text(data: dict, key: str) -> str | None:
    """A text, or None when it is not recorded."""
    value = data.get(key)
    return None if value is None else str(value)


def flag(data: dict, key: str) -> bool | None:
    """A yes or no, or None when it is not recorded."""
    value = data.get(key)
    return bool(value) if isinstance(value, bool | int) else None


def layers(data: dict, key: str) -> tuple[int, ...] | None:
    """A list of layers, ascending, or None when it is not recorded."""
    value = data.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in value):
        raise FileRefused(f"{key} is {value!r}, not a list of layers")
    return tuple(sorted(value))


def items(data: dict, key: str, where: str = "") -> list[dict]:
    """A list of objects.

    Raises
    ------
    Refused
        When it is missing, empty, or holds something else.
    """
    value = data.get(key)
    name = f"{where}.{key}".lstrip(".")
    if not isinstance(value, list) or not value:
        raise FileRefused(f"{name} is missing or empty")
    for index, one in enumerate(value):
        if not isinstance(one, dict):
            raise FileRefused(f"{name}[{index}] is {one!r}, not an object")
    return value


def file_name(path: str | None) -> str | None:
    """The last part of a path, so that two machines' folders do not look like two files."""
    return None if path is None else path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
