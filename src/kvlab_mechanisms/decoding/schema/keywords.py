"""The words of JSON Schema (2020-12) that are read here: the one front end of generation and of contracts.

`GENERATED` are those that a text can be held to while it is generated (`json_schema`); `CHECKED` those that a value is
held to afterwards besides (`kvlab_mechanisms.ledger.contract`). No other word passes: a word that is not read would
promise what nobody keeps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from kvlab.core.errors import ParamsError, suggestion

NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$defs", "definitions", "$comment", "format"}
NOTES_OF_CONTRACTS = NOTES | {"discriminator", "readOnly"}  # which pydantic writes
DIALECT = "https://json-schema.org/draft/2020-12/schema"
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
GENERATED: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern"},
    "integer": BOUNDS,
    "number": BOUNDS,
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
CHECKED: dict[str, set[str]] = {
    "array": {"prefixItems"},
    "object": {"patternProperties", "propertyNames", "minProperties"},
}
WHOLE = {"enum", "const", "anyOf", "$ref"}  # each says all of a value that is generated
WORDS_OF_CONTRACTS = {"type", *WHOLE, "oneOf", "allOf", "not"}.union(*GENERATED.values(), *CHECKED.values())
ONE, LISTS, TABLES = (
    ("items", "additionalProperties", "propertyNames", "not"),
    ("anyOf", "oneOf", "allOf", "prefixItems"),
    ("properties", "patternProperties", "$defs", "definitions"),
)
"""Words that hold a schema, several, or several by name."""


def parts(schema: Mapping, place: str) -> Iterator[tuple[str, object]]:
    """The schemas inside a schema, each with its place."""
    for word in schema.keys() & {*ONE}:
        yield f"{place}/{word}", schema[word]
    for word in schema.keys() & {*LISTS}:
        yield from ((f"{place}/{word}/{number}", one) for number, one in enumerate(schema[word]))
    for word in schema.keys() & {*TABLES}:
        yield from ((f"{place}/{word}/{name}", one) for name, one in schema[word].items())


def finds(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text as ECMA-262 means it: ``$`` is the very end, also before a line's end."""
    return re.search(re.sub(r"(?<!\\)\$", r"\\Z", pattern), text) is not None


def referred(root: object, ref: str, place: str) -> object:
    """What a ``$ref`` names inside its document; `ParamsError` where it names nothing."""
    found: object = root
    for step in unquote(ref).split("/")[1:]:  # RFC 6901, section 6
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    if not ref.startswith("#") or found is None:
        raise ParamsError(f"{place} refers to {ref!r}, which is not in the schema")
    return found


def refuse_unread(root: object, place: str = "#", schema: object = None) -> None:
    """`ParamsError` for the first word of a contract's schema that is not read, with the nearest that is."""
    schema = root if schema is None else schema
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ParamsError(f"{place} is {schema!r}; a schema is an object, true or false")
    for word in schema.keys() - NOTES_OF_CONTRACTS - WORDS_OF_CONTRACTS:
        raise ParamsError(f"{place} has {word!r}, which is not of the subset{suggestion(word, WORDS_OF_CONTRACTS)}")
    if schema.get("$schema", DIALECT) != DIALECT:
        raise ParamsError(f"{place} is in the dialect {schema['$schema']!r}; this reads {DIALECT}")
    for one in [*schema.get("patternProperties", ()), *([schema["pattern"]] if "pattern" in schema else [])]:
        _refuse_pattern(one, place)
    types = schema.get("type", [])
    for one in [types] if isinstance(types, str) else types:
        if one not in GENERATED:
            raise ParamsError(f"{place} has type {one!r}; allowed: {', '.join(GENERATED)}")
    if "$ref" in schema:
        referred(root, schema["$ref"], place)
    for where, one in parts(schema, place):
        refuse_unread(root, where, one)


def _refuse_pattern(pattern: object, place: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ParamsError(f"{place} has the pattern {pattern!r}, which is not read: {error}") from None
