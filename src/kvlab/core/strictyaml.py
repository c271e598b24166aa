"""YAML and JSON of a person's own, read strictly: no key twice, no alias, no tag, and never more than has a use.

A few lines of YAML with aliases can stand for more values than a machine has memory for, and brackets without end for
more depth than Python has; both are refused while they are read, by the line on which they stand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from kvlab.core.errors import ParamsError
from kvlab.core.plain import MOST_DEPTH, MOST_VALUES, shown

MOST_BYTES = 1 << 18
CORE = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "timestamp")}


def read_text(path: Path) -> str:
    """A file of a person's own as text.

    Raises
    ------
    ParamsError
        It is not there, cannot be read, is larger than `MOST_BYTES`, or is no text in UTF-8.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ParamsError(
            f"params file {str(path)!r} does not exist; run where one lies, or write one with `kvlab init`"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ParamsError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MOST_BYTES:
        raise ParamsError(f"{path} is too large; allowed: at most {MOST_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ParamsError(f"{path} is no text in UTF-8, so it is no YAML") from None


def from_yaml(text: str, what: str) -> Any:
    """The value that a YAML text stands for; `what` names it in an error.

    Raises
    ------
    ParamsError
        It is no YAML, or gives a key twice, has an alias, a tag, a key that is no text or number, or too many values.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except _Refused as refused:
        raise ParamsError(f"{what}, line {refused.line}: {refused.said}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2024-13-45 looks like a date
        raise ParamsError(f"{what} is not YAML: {' '.join(str(error).split())}") from None


def from_json(text: str, what: str) -> Any:
    """The value that a JSON text stands for; `ParamsError` as of `from_yaml`, and for NaN and infinity."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ParamsError(f"{what} gives key {shown(key)} twice; give it once")
            found[key] = value
        return found

    def constant(name: str) -> None:
        raise ParamsError(f"{what} holds {name}; allowed: finite numbers")

    if len(text) > MOST_BYTES:
        raise ParamsError(f"{what} is too large; allowed: at most {MOST_BYTES} characters")
    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ParamsError(f"{what} is not JSON: {error}") from None


class _Refused(Exception):
    """Well-formed, and still not taken."""

    def __init__(self, mark: yaml.Mark, said: str):
        self.line, self.said = mark.line + 1, said


class _Loader(yaml.SafeLoader):
    """SafeLoader with limits, that reads 1e-3 as a number (YAML 1.2) where YAML 1.1 reads a string."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self._values = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """One node, counted; its event is looked at before anything is made of it."""
        event = self.peek_event()
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(mark, f"*{event.anchor} stands for what is said elsewhere; allowed: what is meant, in full")
        self._values += 1
        if self._values > MOST_VALUES:
            raise _Refused(mark, f"more than {MOST_VALUES} values; allowed: at most so many")
        if self._depth == MOST_DEPTH:
            raise _Refused(mark, f"deeper than {MOST_DEPTH} levels; allowed: at most so many")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node.tag not in CORE:
            raise _Refused(mark, f"{node.tag!r} is no kind of value here; allowed: texts, numbers, lists, mappings")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """The mapping of a node, whose keys are all different."""
        seen: set = set()
        for key, _ in node.value:
            found = self.construct_object(key) if isinstance(key, yaml.ScalarNode) else None
            if type(found) not in (str, int):
                words = f"key {shown(found)} is no text" if isinstance(key, yaml.ScalarNode) else "a key is no text"
                raise _Refused(key.start_mark, f"{words}; allowed: a parameter's name, in quotes where it needs them")
            if found in seen:
                raise _Refused(key.start_mark, f"key {shown(found)} is given twice; give it once")
            seen.add(found)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
