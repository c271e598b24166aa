"""Enumerations of words: `enum.StrEnum` as Python 3.11 has it, for Python 3.10 too."""

from __future__ import annotations

from enum import Enum


class StrEnum(str, Enum):
    """An enumeration whose members are text, and print as their value."""

    __str__ = str.__str__
