"""Contracts of files that are read: a JSON schema that a value holds or does not, by jsonschema.

jsonschema reads every word of JSON Schema 2020-12 and passes over any other, so that a misspelt word would promise what
nobody keeps: a schema with a word that is not read is refused here when it is compiled. NaN, Infinity, numbers that
float64 does not have, and a key that is there twice are no JSON (RFC 8259, sections 4 and 6).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from kvlab.core.errors import ParamsError, StorageError, UserError, suggestion
from kvlab.core.recipe import canonical

Fault = tuple[str, str]  # where in the value, and what is wrong there

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NOTES = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
    *("$schema", "$id", "$anchor", "$dynamicAnchor", "$vocabulary", "$defs", "definitions"),
    *("contentEncoding", "contentMediaType", "contentSchema", "discriminator"),  # the last one is pydantic's
}
WORDS = sorted(NOTES | Draft202012Validator.VALIDATORS.keys() | {"then", "else", "minContains", "maxContains"})
STRICT = {  # the dialect's own schema reaches each schema inside a schema by this anchor (Core, section 8.2.2)
    "$schema": DIALECT,
    "$id": "urn:kvlab:contract",
    "$dynamicAnchor": "meta",
    "$ref": DIALECT,
    "propertyNames": {"enum": WORDS},
    "properties": {"$schema": {"const": DIALECT}},
}
MOST_FAULTS = 20  # that a refusal tells
MOST_SHOWN = 60  # characters of a value in a message


class ContractBroken(UserError):
    """A value is not what its schema says; a line for each fault."""

    code = "contract"

    def __init__(self, lines: tuple[str, ...]):
        self.told = lines
        super().__init__("\n".join(lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each fault."""
        return self.told


class Contract:
    """A schema that values are held against.

    Parameters
    ----------
    schema : mapping or bool
        JSON Schema 2020-12.

    Raises
    ------
    ParamsError
        It is no such schema, has a word that is not read, or refers to what it does not hold.
    """

    def __init__(self, schema: Mapping | bool):
        _refuse_unread(schema)
        self._check = Checked(schema, registry=REGISTRY)  # which fetches nothing

    @classmethod
    def of(cls, schema: Mapping) -> Contract:
        """The contract of a schema, compiled once in a process for all schemas that say the same."""
        return _of(canonical(schema))

    def holds(self, value: object) -> bool:
        """Whether a value keeps it: at the first fault the answer is no."""
        try:
            return self._check.is_valid(value) and not any(_not_finite(value))
        except RecursionError:
            return False

    def reads(self, text: str | bytes) -> bool:
        """Whether a text is JSON that keeps it."""
        try:
            return self._check.is_valid(decoded(text, "the text"))
        except (StorageError, RecursionError):
            return False

    def faults(self, value: object) -> list[Fault]:
        """All that is wrong, each with its place in the value; empty where it holds."""
        try:
            found = [fault for error in self._check.iter_errors(value) for fault in _faults_of(error)]
            return list(dict.fromkeys([*found, *_not_finite(value)]))
        except RecursionError:
            return [("", "lies too deep, or its schema leads in a circle")]

    def refuse(self, value: object, origin: object) -> None:
        """`ContractBroken`, a line for each fault with the name of the origin, unless the value keeps the contract."""
        if found := self.faults(value):
            lines = [f"{origin}: {place or 'the whole'} {said}" for place, said in found[:MOST_FAULTS]]
            if len(found) > MOST_FAULTS:
                lines.append(f"{origin}: {len(found) - MOST_FAULTS} more things are wrong")
            raise ContractBroken(tuple(lines))


@lru_cache(64)
def _of(text: str) -> Contract:
    return Contract(json.loads(text))


# -------------------------------------------------------------------------------- texts


def decoded(text: str | bytes, origin: object) -> object:
    """The value of a JSON text; `StorageError` in one line, with the name of the origin, where it is none."""
    try:
        return DECODER.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{origin} is not JSON: {error}", code="storage.not-json") from None


def read_strictly(path: Path) -> object:
    """The value of a JSON file; `StorageError` where it cannot be read, or is none."""
    try:
        return decoded(path.read_bytes(), path)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from None


def _refused(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _once(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused(text)


DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_float, object_pairs_hook=_once)

# ------------------------------------------------------------------------------- faults


def _pattern(check, pattern: str, value: object, _schema) -> Iterator[ValidationError]:
    """The word ``pattern`` as ECMA-262 means it: ``$`` is the very end, and not also before a last line's end."""
    ends = re.sub(r"(\\.|\[(?:\\.|[^\]])*\])|\$", lambda found: found[1] or r"\Z", pattern)
    if check.is_type(value, "string") and not re.search(ends, value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


Checked = extend(
    Draft202012Validator,
    {"pattern": _pattern},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine(
        "array", lambda _check, value: isinstance(value, list | tuple)
    ),
)
META = Draft202012Validator(STRICT, format_checker=Draft202012Validator.FORMAT_CHECKER)


def _faults_of(error: ValidationError) -> Iterator[Fault]:
    """What jsonschema found, with a place for each name that is missing or too much."""
    place, word, said, value = _place(error), error.validator, error.validator_value, error.instance
    if word == "required":
        yield from ((_at(place, name), "is missing") for name in said if name not in value)
    elif word == "additionalProperties" and said is False:
        patterns = error.schema.get("patternProperties", ())
        known = error.schema.get("properties", {}).keys() | {
            name for name in value if any(re.search(one, name) for one in patterns)
        }
        yield from ((_at(place, name), "is not known") for name in value if name not in known)
    elif nearest := _nearest(error):
        yield from (fault for one in nearest for fault in _faults_of(one))
    else:
        yield place, f"is {shown(value)}, allowed: {_allowed(error)}"


def _nearest(error: ValidationError) -> list[ValidationError]:
    """What is wrong by the alternative that comes nearest; empty where there is none for a value of this kind."""
    by: dict[object, list[ValidationError]] = {}
    for one in error.context:
        if one.validator is not None:  # what `false` refuses comes without its alternative
            by.setdefault(one.relative_schema_path[0], []).append(one)
    return min((found for found in by.values() if not any(map(_of_another_kind, found))), key=len, default=[])


def _of_another_kind(error: ValidationError) -> bool:
    """Whether an alternative is for other values altogether, so that the rest of what it asks says nothing."""
    if error.relative_path:
        return False
    return error.validator in ("type", "enum", "const") or (bool(error.context) and not _nearest(error))


def _allowed(error: ValidationError) -> str:
    """What is allowed where an error is."""
    word, said = error.validator, error.validator_value
    if error.context:
        return " or ".join(dict.fromkeys(map(_allowed, error.context)))
    if word in (None, "oneOf"):
        return "nothing" if word is None else "one alternative alone, and several hold"
    if word == "type":
        return said if isinstance(said, str) else " or ".join(said)
    if word == "enum":
        return ", ".join(map(str, said))
    return str(said) if word == "const" else f"{word} {shown(said)}"


def _not_finite(value: object, place: str = "") -> Iterator[Fault]:
    """Numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        yield place, f"is {value}, which JSON does not have"
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _not_finite(one, _at(place, name))
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _not_finite(one, f"{place}[{number}]")


def _place(error: ValidationError) -> str:
    return error.json_path.removeprefix("$").removeprefix(".")


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def shown(value: object) -> str:
    """A value in a message, not too long."""
    said = repr(value)
    return said if len(said) <= MOST_SHOWN else f"{said[: MOST_SHOWN - 3]}..."


# ------------------------------------------------------------------------------ schemas


def _refuse_unread(schema: Mapping | bool) -> None:
    """`ParamsError` for the first thing in a schema that is not read, or that refers to nothing."""
    for error in META.iter_errors(schema):
        if error.schema is STRICT["propertyNames"]:
            word, place = error.instance, _place(error) or "the schema"
            raise ParamsError(
                f"{place} has {word!r}, which is no word of JSON Schema 2020-12{suggestion(word, WORDS)}",
                code="params.unread-word",
            )
        place, said = next(_faults_of(error))
        raise ParamsError(f"{place or 'the schema'} {said}", code="params.no-schema")
    left = [(REGISTRY.resolver_with_root(root := DRAFT202012.create_resource(schema)), root)]
    while left:
        resolver, part = left.pop()
        if isinstance(part.contents, Mapping) and "$ref" in part.contents:
            try:
                resolver.lookup(part.contents["$ref"])
            except Unresolvable:
                raise ParamsError(
                    f"{part.contents['$ref']!r} is referred to, and is not in the schema", code="params.reference"
                ) from None
        left += [(resolver.in_subresource(one), one) for one in part.subresources()]
