"""How a flag of the command line is declared: its name, and what argparse is told of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

Flag = tuple[str, dict] | Callable[[argparse.ArgumentParser], None]
"""One flag, or what adds several that are declared elsewhere."""


def path(flag: str, text: str, **options) -> Flag:
    """A flag that names a file; needed unless `options` say otherwise."""
    return flag, {"type": Path, "metavar": "FILE", "help": text, "required": True} | options


def word(flag: str, text: str, **options) -> Flag:
    """A flag that takes one word."""
    return flag, {"help": text} | options


def place(name: str, text: str, **options) -> Flag:
    """A file that is given without a flag."""
    return name, {"type": Path, "metavar": "FILE", "help": text} | options


PARAMS = word("--params", "default: params.yaml", default="params.yaml", metavar="FILE|JSON")
MODEL = word("--model", "one of `models`; needed where params.yaml lists several", metavar="SLUG")
