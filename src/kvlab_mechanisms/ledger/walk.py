"""What is wrong with a value by a schema: every fault with its place. The meaning of a contract, written out.

JSON Schema 2020-12 (Core, sections 10.2 and 10.3; Validation, section 6) of the words in `decoding.schema.keywords`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from kvlab_mechanisms.decoding.schema.keywords import finds, referred

Fault = tuple[str, str]  # where in the value, and what is wrong there
MOST_DEPTH = 200  # of values in one another, and of references that lead to no value


def faults(schema: object, value: object, root: object = None, place: str = "", depth: int = 0) -> Iterator[Fault]:
    """Everything that is wrong with a value.

    Parameters
    ----------
    schema : mapping or bool
        Of words that `refuse_unread` has passed.
    root : mapping or bool, optional
        The document that references name; the schema itself by default.
    """
    root = schema if root is None else root
    if schema is True:
        return
    if schema is False or depth > MOST_DEPTH:
        yield place, "nothing is allowed here" if schema is False else f"lies deeper than {MOST_DEPTH}"
        return
    for word, said in schema.items():
        if word in WORDS:
            yield from WORDS[word](said, value, schema, root, place, depth + 1)
    if isinstance(value, float) and not math.isfinite(value):
        yield place, f"is {value}, which JSON does not have"


def equal(a: object, b: object) -> bool:
    """Whether two plain values are the same to JSON: 1 is 1.0, and neither is true."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def is_number(value: object) -> bool:
    """Whether it is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(value: object) -> bool:
    return is_number(value) and (isinstance(value, int) or value.is_integer())


IS: dict[str, Callable[[object], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": _integer,
    "number": is_number,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list | tuple),
    "object": lambda value: isinstance(value, Mapping),
}


def _type(said, value, _schema, _root, place, _depth):
    kinds = [said] if isinstance(said, str) else said
    if not any(IS[kind](value) for kind in kinds):
        yield place, f"is {shown(value)}, allowed: {' or '.join(kinds)}"


def _enum(said, value, _schema, _root, place, _depth):
    if not any(equal(value, one) for one in said):
        yield place, f"is {shown(value)}, allowed: {', '.join(map(str, said))}"


def _const(said, value, _schema, _root, place, _depth):
    if not equal(value, said):
        yield place, f"is {shown(value)}, allowed: {said}"


def _bound(words: str, breaks: Callable, applies: Callable, measure: Callable = lambda value: value) -> Callable:
    """A word that compares a number, or how long something is, with a bound."""

    def check(said, value, _schema, _root, place, _depth):
        if applies(value) and breaks(measure(value), said):
            yield place, f"is {shown(value)}, allowed: {words} {said}"

    return check


def _pattern(said, value, _schema, _root, place, _depth):
    if isinstance(value, str) and not finds(said, value):
        yield place, f"is {shown(value)}, which {said} does not find"


def _items(said, value, schema, root, place, depth):
    if IS["array"](value):
        first = len(schema.get("prefixItems", ()))
        for number, one in enumerate(value[first:], first):
            yield from faults(said, one, root, f"{place}[{number}]", depth)


def _prefix(said, value, _schema, root, place, depth):
    if IS["array"](value):
        for number, (part, one) in enumerate(zip(said, value, strict=False)):
            yield from faults(part, one, root, f"{place}[{number}]", depth)


def _properties(said, value, _schema, root, place, depth):
    if IS["object"](value):
        for name in said.keys() & value.keys():
            yield from faults(said[name], value[name], root, _at(place, name), depth)


def _patterns(said, value, _schema, root, place, depth):
    if IS["object"](value):
        for pattern, part in said.items():
            for name in value:
                if finds(pattern, name):
                    yield from faults(part, value[name], root, _at(place, name), depth)


def _additional(said, value, schema, root, place, depth):
    if IS["object"](value):
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name in value:
            if name not in known and not any(finds(pattern, name) for pattern in patterns):
                if said is False:
                    yield _at(place, name), "is not known"
                else:
                    yield from faults(said, value[name], root, _at(place, name), depth)


def _names(said, value, _schema, root, place, depth):
    if IS["object"](value):
        for name in value:
            yield from faults(said, name, root, _at(place, name), depth)


def _required(said, value, _schema, _root, place, _depth):
    if IS["object"](value):
        yield from ((_at(place, name), "is missing") for name in said if name not in value)


def _reference(said, value, _schema, root, place, depth):
    yield from faults(referred(root, said, place), value, root, place, depth)


def _all_of(said, value, _schema, root, place, depth):
    for part in said:
        yield from faults(part, value, root, place, depth)


def _any_of(said, value, _schema, root, place, depth):
    found = [list(faults(part, value, root, place, depth)) for part in said]
    if all(found):
        yield from min(found, key=len, default=[(place, "nothing is allowed here")])


def _one_of(said, value, _schema, root, place, depth):
    found = [list(faults(part, value, root, place, depth)) for part in said]
    fitting = sum(not one for one in found)
    if fitting > 1:
        yield place, f"is {shown(value)}, which {fitting} alternatives allow where one may"
    elif not fitting:
        yield from min(found, key=len, default=[(place, "nothing is allowed here")])


def _not(said, value, _schema, root, place, depth):
    if not list(faults(said, value, root, place, depth)):
        yield place, f"is {shown(value)}, which is not allowed"


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def shown(value: object) -> str:
    """A value in a message, not too long."""
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."


NUMBER, TEXT, ARRAY, OBJECT = is_number, IS["string"], IS["array"], IS["object"]
WORDS: dict[str, Callable[..., Iterator[Fault]]] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "minimum": _bound("at least", lambda a, b: a < b, NUMBER),
    "maximum": _bound("at most", lambda a, b: a > b, NUMBER),
    "exclusiveMinimum": _bound("more than", lambda a, b: a <= b, NUMBER),
    "exclusiveMaximum": _bound("less than", lambda a, b: a >= b, NUMBER),
    "minLength": _bound("characters, at least", lambda a, b: a < b, TEXT, len),
    "maxLength": _bound("characters, at most", lambda a, b: a > b, TEXT, len),
    "pattern": _pattern,
    "minItems": _bound("items, at least", lambda a, b: a < b, ARRAY, len),
    "maxItems": _bound("items, at most", lambda a, b: a > b, ARRAY, len),
    "items": _items,
    "prefixItems": _prefix,
    "properties": _properties,
    "patternProperties": _patterns,
    "additionalProperties": _additional,
    "propertyNames": _names,
    "minProperties": _bound("entries, at least", lambda a, b: a < b, OBJECT, len),
    "required": _required,
    "$ref": _reference,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
}
