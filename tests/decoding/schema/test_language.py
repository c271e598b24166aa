"""The language of a schema: exactly the valid texts of a tiny alphabet, and nothing that cannot be ended."""

from __future__ import annotations

import itertools
import json
import random
import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import CapabilityError, ParamsError
from kvlab_mechanisms.decoding.schema.automaton import DEAD, Automaton
from kvlab_mechanisms.decoding.schema.json_schema import dumped, language
from kvlab_mechanisms.decoding.schema.ranges import integers, utf8
from kvlab_mechanisms.decoding.schema.regex import LAST, pattern
from tiers import examples

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.(org|net)$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 1, None, {"x": [True]}]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [
        {"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip
MIXED = {
    "type": "array",
    "items": {"anyOf": [{"type": "number"}, {"type": "string"}, {"const": 'q"\\é\n'}]},
    "maxItems": 4,
}
SCHEMAS = {"person": PERSON, "tree": TREE, "mixed": MIXED}


def walked(automaton: Automaton, chance: random.Random) -> bytes:
    """A random text of the language; after a while it takes the way to an end that is nearest at hand."""
    state, raw = automaton.start, bytearray()
    while True:
        row = automaton.row(state)
        if automaton.accepts(state) and (not row or chance.random() < 0.3 or len(raw) > 60):
            return bytes(raw)
        allowed = sorted(row)
        if len(raw) > 60:
            closing = [byte for byte in allowed if byte in b'"]},']
            allowed = closing or [byte for byte in allowed if byte in b"0123456789"] or allowed
        byte = chance.choice(allowed)
        raw.append(byte)
        state = row[byte]
        assert len(raw) < 2000


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_walks_are_valid(name):
    automaton, chance = Automaton(language(SCHEMAS[name])), random.Random(name)
    check = jsonschema.Draft202012Validator(SCHEMAS[name])
    for _ in range(4000):
        text = walked(automaton, chance).decode()
        assert check.is_valid(json.loads(text)), text


EQUAL = [
    ({"type": "integer", "minimum": -12, "maximum": 21}, "0123-"),
    ({"type": "integer", "exclusiveMinimum": 9}, "0129-"),
    ({"type": "integer", "maximum": -10}, "0129-"),
    ({"type": "string", "minLength": 1, "maxLength": 2}, 'ab"'),
    ({"type": "string", "pattern": "a(b|ba)+$"}, 'ab"'),
    ({"type": "string", "pattern": "^(?:a|b{2,3})?$"}, 'ab"'),
    ({"type": ["string", "null"]}, 'nul"'),
    ({"enum": [1, "1", [1], 11]}, '1"[]'),
    ({"type": "integer", "enum": [1, "1", 11, True]}, '1"true'),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, "[1,0]"),
    ({"type": "array", "items": {"type": "array", "items": {"const": 1}, "maxItems": 1}}, "[1,]"),
    ({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 1}}, "required": ["b"],
      "additionalProperties": False}, '{"ab:1,}'),
    ({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False}, '{"a:1}'),
    ({"anyOf": [{"const": 1}, {"type": "integer", "minimum": 20, "maximum": 22}, False]}, "012"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "alphabet"), EQUAL, ids=[str(i) for i in range(len(EQUAL))])
def test_the_language_is_the_valid_texts_in_their_one_spelling(schema, alphabet):
    automaton, check = Automaton(language(schema)), jsonschema.Draft202012Validator(schema)
    alphabet, longest = sorted(set(alphabet)), 13 if "{" in alphabet else 6
    found, left = set(), [("", automaton.start)]
    while left:
        text, state = left.pop()
        found |= {text} if automaton.accepts(state) else set()
        if len(text) < longest:
            left += [(text + s, after) for s in alphabet if (after := automaton.step(state, ord(s))) != DEAD]
    want = {text for text in texts(alphabet, longest) if valid(text, check)}
    assert found == want
    assert found


def texts(alphabet, longest) -> set[str]:
    """All texts of an alphabet; for the long ones of objects those that are made of their pairs."""
    if longest == 6:
        return {"".join(signs) for n in range(1, 7) for signs in itertools.product(alphabet, repeat=n)}
    pairs = ['"a":1', '"b":1', '"a":11', '"ab":1', ""]
    chosen = itertools.chain.from_iterable(itertools.product(pairs, repeat=n) for n in range(4))
    return {text for parts in chosen if len(text := "{" + ",".join(parts) + "}") <= longest}


def valid(text: str, check) -> bool:
    try:
        value = json.loads(text, object_pairs_hook=once)
    except ValueError:
        return False
    in_order = not isinstance(value, dict) or list(value) == sorted(value)
    return in_order and dumped(value) == text and check.is_valid(value)


def once(pairs):
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


@examples(60)
@given(st.one_of(st.none(), st.integers(-3000, 3000)), st.one_of(st.none(), st.integers(-3000, 3000)))
def test_integers_between_bounds(low, high):
    if low is not None and high is not None and low > high:
        with pytest.raises(CapabilityError):
            Automaton(integers(low, high))
        return
    automaton = Automaton(integers(low, high))
    for n in {
        *range(-50, 50),
        *(n + d for n in (low or 0, high or 0, -1000, 1000) for d in (-1, 0, 1)),
        10**7,
        -(10**7),
    }:
        assert automaton.matches(str(n).encode()) == ((low is None or n >= low) and (high is None or n <= high)), n


@examples(60)
@given(
    st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF), st.lists(st.characters(exclude_categories=["Cs"]), max_size=20)
)
def test_ranges_of_characters(a, b, signs):
    low, high = sorted((a, b))
    if all(0xD800 <= x <= 0xDFFF for x in (low, high)):
        return
    automaton = Automaton(utf8(low, high))
    for code in {low, high, low - 1, high + 1, *map(ord, signs)} - set(range(0xD800, 0xE000)):
        if 0 <= code <= LAST:
            assert automaton.matches(chr(code).encode()) == (low <= code <= high)


@pytest.mark.parametrize(
    "source",
    ["a", "^a", "a$", "^[a-c]*$", "^[^a]b?$", "(a|bc){1,2}", "^\\d\\w\\.$", "^.{2}$", "^a{2,}$", "[\\w-]", "^(a*)*b$"],
)
def test_patterns_are_those_of_re(source):
    automaton = Automaton(pattern(source))
    for n in range(5):
        for signs in itertools.product("abc1.-", repeat=n):
            text = "".join(signs)
            assert automaton.matches(text.encode()) == bool(re.search(source, text)), text


@pytest.mark.parametrize("source", ["a*?", "(?=a)", "^a|b$", "(a", "a)", "[a", "\\bx", "a{3,2}", "*a", "[z-a]"])
def test_patterns_that_are_not_read_are_refused(source):
    with pytest.raises(ParamsError, match="pattern"):
        pattern(source)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (True, "any value"),
        ({}, "no type"),
        ({"type": "text"}, "text"),
        ({"type": "string", "maxlength": 3}, "maxLength"),
        ({"type": "number", "minimum": 1}, "no integer"),
        ({"type": "object"}, "any properties"),
        ({"type": "object", "properties": {}, "additionalProperties": {"type": "null"}}, "any properties"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "'a'"),
        ({"type": "array"}, "anything"),
        ({"type": "array", "items": False, "minItems": 3, "maxItems": 2}, "above"),
        ({"$ref": "#/nowhere"}, "not in the schema"),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "together"),
        ({"type": "string", "pattern": "a", "minLength": 1}, "pattern and a length"),
    ],
)
def test_what_is_not_in_the_subset_is_refused_by_name(schema, said):
    with pytest.raises(ParamsError, match=said):
        language(schema)


def test_recursion_ends_at_its_depth_and_nothing_reachable_is_a_dead_end():
    automaton = Automaton(language(TREE, depth=2))
    assert automaton.matches(b'{"v":1,"next":{"v":2,"next":null}}')
    assert not automaton.matches(b'{"v":1,"next":{"v":2,"next":{"v":3,"next":null}}}')
    assert automaton.run(b'{"v":1,"next":{"v":2,"next":{') == DEAD  # not only the whole: the way in
    for schema in SCHEMAS.values():
        automaton, left, seen = Automaton(language(schema)), [0], set()
        left = [automaton.start]
        while left:
            state = left.pop()
            if state not in seen:
                seen.add(state)
                assert automaton.row(state) or automaton.accepts(state)
                left += automaton.row(state).values()
    with pytest.raises(CapabilityError, match="no text"):
        Automaton(language({"$ref": "#"}))
    with pytest.raises(CapabilityError, match="states"):
        Automaton(language({"type": "string", "minLength": 10**5}))
