"""The files of the gate, read by the strict reader of `kvlab.core.strictyaml`; what it refuses has the gate's codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvlab.core.strictyaml import Unreadable, from_json, from_yaml, read_text
from kvlab.gate.catalogue.values import RowError
from kvlab.gate.reasons import Reason

MOST_JSON = 1 << 28  # bytes: programs write JSON, of as many rows and items as were measured
CODES = {"params.unreadable.twice": "field_twice", "params.unreadable.not-finite": "value_not_finite"}


def read_json(path: Path | str) -> Any:
    """The value in a JSON file.

    Raises
    ------
    StorageError
        It cannot be read.
    RowError
        It is no JSON or too large (``file_not_json``), gives a key twice in one object (``field_twice``) or holds NaN
        or an infinity (``value_not_finite``), as a number too large for a float is.
    """
    try:
        return from_json(read_text(Path(path), MOST_JSON), str(path), MOST_JSON)
    except Unreadable as refused:
        raise _row_error(refused, path, "file_not_json") from None


def read_yaml(path: Path | str) -> Any:
    """The value in a YAML file.

    Raises
    ------
    StorageError
        It cannot be read.
    RowError
        It is no YAML, or YAML with an alias, a tag, or more than has a use (``file_not_yaml``), or gives a key twice
        in one mapping (``field_twice``).
    """
    try:
        return from_yaml(read_text(Path(path)), str(path))
    except Unreadable as refused:
        raise _row_error(refused, path, "file_not_yaml") from None


def _row_error(refused: Unreadable, path: Path | str, code: str) -> RowError:
    return RowError([Reason(code=CODES.get(refused.code, code), field=str(path), said=refused.said)])
