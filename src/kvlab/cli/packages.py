"""Packages beside the library, found by their entry points: the mechanisms, and in a checkout the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from types import ModuleType

from kvlab.core.errors import UserError

PARAMS = "kvlab.params"


def found(group: str) -> Iterator[EntryPoint]:
    """The entry points of a group whose packages are there: the wheel names the pipeline too, and does not hold it."""
    return (point for point in entry_points(group=group) if find_spec(point.module.partition(".")[0]))


def reader_of_params() -> ModuleType:
    """The module that reads params.yaml, with `read_params` and `by_model`; it is the pipeline's.

    Raises
    ------
    UserError
        There is no pipeline here: kvlab was installed from a wheel.
    """
    for point in found(PARAMS):
        return import_module(point.module)
    raise UserError(
        "params.yaml belongs to the pipeline, which a checkout of kvlab has; name a folder with --model DIR"
    )
