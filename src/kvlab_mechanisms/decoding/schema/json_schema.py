"""A subset of JSON Schema (2020-12) as the language of its texts, written in one way each.

A text has no white space, an object its properties in their declared order and no others, an integer no fraction.
So every text that is allowed is valid, and of the texts of a valid value one order of keys and one spelling of numbers
is allowed: a generator needs no more. What is not in the subset is refused when the schema is read, by name and place;
for values without a bound on their depth there is xgrammar (`constrained`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from kvlab.core.errors import ParamsError, suggestion
from kvlab_mechanisms.decoding.schema.keywords import BOUNDS, GENERATED, NOTES, WHOLE, referred
from kvlab_mechanisms.decoding.schema.parts import EMPTY, Bytes, Either, Part, Repeated, Then, optional, text
from kvlab_mechanisms.decoding.schema.ranges import DIGITS, integers
from kvlab_mechanisms.decoding.schema.regex import ANY, characters, pattern

NOTHING = Either(())
HEX = Either(tuple(Bytes((ends,)) for ends in (DIGITS, (0x41, 0x46), (0x61, 0x66))))
SHORT = Then((text("\\"), Either(tuple(text(sign) for sign in '"\\/bfnrt'))))
LONG = Then((text("\\u"), Repeated(HEX, 4, 4)))
CHARACTER = Either((characters(ANY), SHORT, LONG))
COUNTED = Either((characters(ANY), SHORT))
"""Without hexadecimal escapes, two of which may be one character."""
SOME = Repeated(Bytes((DIGITS,)), 1)
SIGNED = Then((optional(text("-")), Either((text("0"), Then((Bytes(((0x31, 0x39),)), Repeated(Bytes((DIGITS,)))))))))
EXPONENT = Then((Either((text("e"), text("E"))), optional(Either((text("+"), text("-")))), SOME))
NUMBER = Then((SIGNED, optional(Then((text("."), SOME))), optional(EXPONENT)))


def language(schema: object, depth: int = 4) -> Part:
    """All texts that a schema allows, in their one spelling.

    Parameters
    ----------
    schema : mapping, or bool
    depth : int
        How often a ``$ref`` is followed inside itself; what lies deeper is left out of the language.

    Raises
    ------
    ParamsError
        The schema has a keyword that is not of the subset, or asks for values without bound.
    """
    return _Reader(schema, depth).part(schema, "#", {})


def dumped(value: object) -> str:
    """A value in the spelling of the language."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class _Reader:
    """A descent through a schema."""

    def __init__(self, root: object, depth: int):
        self.root, self.depth = root, depth

    def part(self, schema: object, place: str, followed: Mapping[str, int]) -> Part:
        """The texts of a part of the schema."""
        if schema is False:
            return NOTHING
        if not isinstance(schema, Mapping):
            raise ParamsError(f"{place} allows any value, of any depth; name a type, or use xgrammar")
        said = schema.keys() - NOTES
        whole = said & WHOLE
        if len(whole) > 1 or (whole and said - whole - ({"type"} if whole <= {"enum", "const"} else set())):
            raise ParamsError(
                f"{place} has {', '.join(sorted(said))} together; the reference automaton reads one alone"
            )
        if "anyOf" in whole:
            return Either(
                tuple(self.part(one, f"{place}/anyOf/{i}", followed) for i, one in enumerate(schema["anyOf"]))
            )
        if "$ref" in whole:
            return self.reference(schema["$ref"], place, followed)
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else list(types)
        if whole:
            values = schema["enum"] if "enum" in whole else [schema["const"]]
            return Either(tuple(text(dumped(one)) for one in values if not types or any(_is(one, t) for t in types)))
        self.refuse_unknown(said, types, place)
        return Either(tuple(getattr(self, f"of_{one}")(schema, place, followed) for one in types))

    def refuse_unknown(self, said: set[str], types: Sequence[str], place: str) -> None:
        """See `language`."""
        wrong = [one for one in types if one not in GENERATED]
        if wrong or not types:
            raise ParamsError(
                f"{place} has {f'type {wrong[0]!r}' if wrong else 'no type'}; allowed: {', '.join(GENERATED)}"
            )
        known = {"type"}.union(*(GENERATED[one] for one in types))
        for keyword in sorted(said - known):
            raise ParamsError(f"{place} has {keyword!r}, which is not of the subset{suggestion(keyword, known)}")

    def reference(self, ref: str, place: str, followed: Mapping[str, int]) -> Part:
        """What a ``$ref`` inside the document names."""
        if followed.get(ref, 0) >= self.depth:
            return NOTHING
        found = referred(self.root, ref, place)
        return self.part(found, ref, {**followed, ref: followed.get(ref, 0) + 1})

    def of_string(self, schema: Mapping, place: str, _followed) -> Part:
        """A string: free, counted, or of a pattern."""
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        bounded = least > 0 or most is not None
        if "pattern" in schema:
            if bounded:
                raise ParamsError(f"{place} has a pattern and a length; write the length into the pattern")
            return Then((text('"'), pattern(schema["pattern"]), text('"')))
        inner = Repeated(COUNTED if bounded else CHARACTER, least, _most(place, "Length", least, most))
        return Then((text('"'), inner, text('"')))

    def of_integer(self, schema: Mapping, _place, _followed) -> Part:
        """A whole number between bounds."""
        low = [math.ceil(schema["minimum"])] if "minimum" in schema else []
        low += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
        high = [math.floor(schema["maximum"])] if "maximum" in schema else []
        high += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
        return integers(max(low, default=None), min(high, default=None))

    def of_number(self, schema: Mapping, place: str, _followed) -> Part:
        """Any number."""
        if schema.keys() & BOUNDS:
            raise ParamsError(f"{place} bounds a number that is no integer; use xgrammar")
        return NUMBER

    def of_boolean(self, _schema, _place, _followed) -> Part:
        """True or false."""
        return Either((text("true"), text("false")))

    def of_null(self, _schema, _place, _followed) -> Part:
        """Nothing."""
        return text("null")

    def of_array(self, schema: Mapping, place: str, followed) -> Part:
        """Items with commas between them."""
        if "items" not in schema:
            raise ParamsError(f"{place} is an array without items, which may hold anything; name them, or use xgrammar")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        most = _most(place, "Items", least, most)
        item = self.part(schema["items"], f"{place}/items", followed)
        rest = Repeated(Then((text(","), item)), max(least - 1, 0), None if most is None else max(most - 1, 0))
        filled = NOTHING if most == 0 else Then((item, rest))
        return Then((text("["), filled if least else optional(filled), text("]")))

    def of_object(self, schema: Mapping, place: str, followed) -> Part:
        """Properties in their order; the first that is there has no comma before it."""
        properties, required = schema.get("properties"), set(schema.get("required", ()))
        if properties is None or schema.get("additionalProperties", False) is not False:
            raise ParamsError(f"{place} may have any properties; name them all, or use xgrammar")
        if required - properties.keys():
            raise ParamsError(
                f"{place} requires {sorted(required - properties.keys())[0]!r}, which is no property of it"
            )
        pairs = [
            (name, Then((text(dumped(name) + ":"), self.part(one, f"{place}/properties/{name}", followed))))
            for name, one in properties.items()
        ]
        after = [Then((text(","), pair)) for _, pair in pairs]
        after = [one if name in required else optional(one) for one, (name, _) in zip(after, pairs, strict=True)]
        begun: list[Part] = []
        for i, (name, pair) in enumerate(pairs):
            begun.append(Then((pair, *after[i + 1 :])))
            if name in required:
                break
        return Then((text("{"), Either(tuple(begun if required else [*begun, EMPTY])), text("}")))


def _most(place: str, what: str, least: int, most: int | None) -> int | None:
    if most is not None and most < least:
        raise ParamsError(f"{place} has min{what} {least} above max{what} {most}")
    return most


def _is(value: object, kind: str) -> bool:
    """Whether a value is of a type of JSON Schema."""
    if isinstance(value, bool):
        return kind == "boolean"
    kinds = {"string": str, "integer": int, "number": int | float, "null": type(None), "array": list, "object": dict}
    return isinstance(value, kinds.get(kind, ()))
