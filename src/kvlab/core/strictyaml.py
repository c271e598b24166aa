"""YAML and JSON that a person wrote, read strictly: no key twice, no alias, and never more than has a use.

YAML is read by ruamel.yaml, as YAML 1.2: ``yes`` and ``on`` are texts, which no true or false takes, and ``1e-3`` is a
number. JSON is read by the standard library, whose hooks see a key that is given twice; pydantic's reader keeps the
last one and says nothing.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, MaxDepthExceededError
from ruamel.yaml.constructor import DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent

from kvlab.core.errors import ParamsError, StorageError
from kvlab.core.limits import MOST_DEPTH, MOST_VALUES, WIDEST, shown

MOST_BYTES = 1 << 18
INT = "tag:yaml.org,2002:int"
KINDS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "timestamp")}


class Unreadable(ParamsError):
    """A text that is not taken."""

    code = "params.unreadable"

    def __init__(self, what: str, said: str, code: str | None = None):
        self.said = said
        super().__init__(f"{what} {said}", code=code)


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a file.

    Raises
    ------
    StorageError
        It cannot be read.
    Unreadable
        It is larger than `most` bytes, or no text in UTF-8.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(most + 1)
    except FileNotFoundError:
        raise StorageError(f"cannot read {path}, which does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise StorageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > most:
        raise Unreadable(str(path), f"is too large; allowed: at most {most} bytes", code="params.unreadable.too-large")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Unreadable(str(path), "is no text in UTF-8") from None


def from_yaml(text: str, what: str) -> Any:
    """The value that a YAML text stands for; `what` names it in an error.

    Raises
    ------
    Unreadable
        It is no YAML, is too deep or holds too many values, gives a key twice, or has an alias, a tag of a kind that
        is not plain, or a key that is no text or whole number.
    """
    yaml = YAML(typ="safe", pure=True)  # pure: one behaviour, whether or not the parser in C is installed
    yaml.allow_duplicate_keys, yaml.max_depth = False, MOST_DEPTH
    yaml.Composer, yaml.Constructor = _Composer, _Constructor
    try:
        return yaml.load(text)
    except _Refused as refused:
        raise Unreadable(what, f"line {refused.line}: {refused.said}", code=refused.code) from None
    except MaxDepthExceededError as error:
        said = f"deeper than {MOST_DEPTH} levels; allowed: at most so many"
        raise Unreadable(
            what, f"line {error.problem_mark.line + 1}: {said}", code="params.unreadable.too-deep"
        ) from None
    # the last three: 2024-13-45 looks like a date, -_ like a number, and `!!bool maybe` says that it is a truth
    except (YAMLError, ValueError, LookupError, AttributeError) as error:
        raise Unreadable(
            what, f"is not YAML: {' '.join(str(error).split())}", code="params.unreadable.syntax"
        ) from None


def from_json(text: str, what: str, most: int = MOST_BYTES) -> Any:
    """The value that a JSON text of at most `most` characters stands for; `what` names it in an error.

    Raises
    ------
    Unreadable
        It is no JSON or too large, gives a key twice, or holds NaN, infinity, or a number too large for a float.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise Unreadable(what, f"gives key {shown(key)} twice; give it once", code="params.unreadable.twice")
            found[key] = value
        return found

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            said = f"holds {number[:WIDEST]}, no finite number; allowed: one, or null"
            raise Unreadable(what, said, code="params.unreadable.not-finite")
        return value

    if len(text) > most:
        raise Unreadable(what, f"is too large; allowed: at most {most} characters", code="params.unreadable.too-large")
    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise Unreadable(what, f"is not JSON: {error}", code="params.unreadable.syntax") from None


class _Refused(Exception):
    """Well-formed, and still not taken."""

    def __init__(self, node: Any, said: str, code: str | None = None):
        self.line, self.said, self.code = node.start_mark.line + 1, said, code


class _Composer(Composer):
    """Refuses what ruamel.yaml has no switch for: aliases, too many values, odd kinds, and numbers of two meanings."""

    values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """One node, counted; its event is looked at before anything is made of it."""
        event = self.parser.peek_event()
        self.values += 1
        if isinstance(event, AliasEvent):
            said = f"*{event.anchor} stands for what is said elsewhere; allowed: what is meant, in full"
            raise _Refused(event, said, code="params.unreadable.alias")
        if self.values > MOST_VALUES:
            raise _Refused(event, f"more than {MOST_VALUES} values; allowed: at most so many")
        node = super().compose_node(parent, index)
        kind = str(node.tag)
        if kind not in KINDS:
            raise _Refused(node, f"{kind!r} is no kind of value here; allowed: texts, numbers, lists, mappings")
        if kind == INT and re.fullmatch("[-+]?0[0-9_]+", node.value):
            # 017 is 17 in YAML 1.2 and 15 in YAML 1.1, by which Snakemake reads params.yaml
            raise _Refused(node, f"{node.value[:WIDEST]} begins with 0; allowed: a number without, or a text in quotes")
        return node


class _Constructor(SafeConstructor):
    """Takes texts and whole numbers as keys, each once."""

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        """Whether a key is new."""
        if type(key) not in (str, int):
            words = "a key" if isinstance(key, tuple) else f"key {shown(key)}"
            raise _Refused(key_node, f"{words} is no text; allowed: a name, in quotes where it needs them")
        try:
            return super().check_mapping_key(node, key_node, mapping, key, value)
        except DuplicateKeyError:
            raise _Refused(
                key_node, f"key {shown(key)} is given twice; give it once", code="params.unreadable.twice"
            ) from None
