"""Whole numbers that a caller gives."""

from __future__ import annotations

from kvlab.core.errors import ParamsError


def counted(name: str, value: object, least: int = 0) -> int:
    """`value` itself; `ParamsError` when it is not a whole number from `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ParamsError(f"{name} is {value!r}; it has to be a whole number from {least}")
    return value
