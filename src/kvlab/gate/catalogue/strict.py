"""JSON and YAML read strictly: a key given twice, NaN and infinity are refused, where parsers take them silently."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

from kvlab.core.errors import StorageError
from kvlab.gate.catalogue.values import RowError, shown
from kvlab.gate.reasons import Reason


def read_json(path: Path | str) -> Any:
    """The value in a JSON file.

    Raises
    ------
    StorageError
        It cannot be read.
    RowError
        It is no JSON (``file_not_json``), gives a key twice in one object (``field_twice``) or holds NaN or an
        infinity (``value_not_finite``), as a number too large for a float is.
    """
    text = _text(path, "file_not_json")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_finite, parse_float=_finite)
    except _Refused as refused:
        raise RowError([refused.reason], str(path)) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, "file_not_json", f"is not JSON: {error}") from None


def read_yaml(path: Path | str) -> Any:
    """The value in a YAML file.

    Raises
    ------
    StorageError
        It cannot be read.
    RowError
        It is no YAML (``file_not_yaml``) or gives a key twice in one mapping (``field_twice``).
    """
    text = _text(path, "file_not_yaml")
    try:
        return yaml.load(text, Loader=_Loader)
    except _Refused as refused:
        raise RowError([refused.reason], str(path)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2024-13-45 looks like a date
        raise _unreadable(path, "file_not_yaml", f"is not YAML: {' '.join(str(error).split())}") from None


class _Refused(Exception):
    """Well-formed, and still not taken."""

    def __init__(self, code: str, field: str, said: str):
        self.reason = Reason(code=code, field=field, said=said)


def _text(path: Path | str, code: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise _unreadable(path, code, "is no text in UTF-8") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from None


def _unreadable(path: Path | str, code: str, said: str) -> RowError:
    return RowError([Reason(code=code, field=str(path), said=said)])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _twice(next(key for key in keys if keys.count(key) > 1))
    return found


def _twice(key: object) -> _Refused:
    return _Refused("field_twice", f"key {shown(key)}", "is given twice; give it once")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise _Refused("value_not_finite", text, "is no finite number; write null where there is none")
    return value


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice and reads 1e-3 as a number (YAML 1.2), not as a text (YAML 1.1)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """The mapping of a node; the keys as written, before others are merged in, are all different."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list or a mapping as a key: refused by what follows
            if (key.tag, key.value) in seen:
                raise _twice(key.value)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
