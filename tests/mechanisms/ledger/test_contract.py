"""Contracts: the verdict is jsonschema's, every fault has its place, and what is no JSON or no word is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import ParamsError, StorageError
from kvlab_mechanisms.ledger.contract import Contract, ContractBroken, decoded, read_strictly
from mechanisms.decoding.test_schema import PERSON
from refusals import refused

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]
NAMES = st.sampled_from(["a", "b", "ab", "n"])
PLAIN = (
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from([0.0, 1.0, 1.5, -0.0]) | st.text("ab1", max_size=3)
)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
WORDS = {
    "enum": st.lists(VALUES, min_size=1, max_size=3),
    "const": VALUES,
    "minimum": st.integers(-1, 2),
    "maximum": st.sampled_from([0, 1, 1.5]),
    "exclusiveMinimum": st.integers(-1, 2),
    "exclusiveMaximum": st.integers(-1, 2),
    "minLength": st.integers(0, 2),
    "maxLength": st.integers(0, 2),
    "pattern": st.sampled_from(["^a", "b$", "1", "^(a|b)*$"]),
    "minItems": st.integers(0, 2),
    "maxItems": st.integers(0, 2),
    "minProperties": st.integers(0, 2),
    "required": st.lists(NAMES, max_size=2, unique=True),
}
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]


def deeper(inner):
    lists = st.lists(inner, min_size=1, max_size=2)
    named = st.dictionaries(NAMES, inner, max_size=2)
    held = {word: inner for word in ("items", "additionalProperties", "not")}
    held |= {word: lists for word in ("anyOf", "oneOf", "allOf", "prefixItems")}
    held |= {"properties": named, "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=2)}
    held |= {"propertyNames": st.fixed_dictionaries({"pattern": WORDS["pattern"]})}
    return st.fixed_dictionaries({}, optional=held | {"type": TYPE, "minItems": WORDS["minItems"]})


TYPE = st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True)
LEAF = st.fixed_dictionaries({}, optional={"type": TYPE} | WORDS) | st.booleans()
DRAWN = st.recursive(LEAF, deeper, max_leaves=5)


@given(DRAWN, st.lists(VALUES, min_size=1, max_size=8))
def test_the_verdict_is_jsonschemas_and_a_fault_is_told_where_it_is_no(schema, values):
    contract, other = Contract(schema), jsonschema.Draft202012Validator(schema)
    for value in values:
        wanted = other.is_valid(value)
        assert contract.holds(value) == wanted, (schema, value)
        assert (contract.faults(value) == []) == wanted, (schema, value)
        assert contract.reads(json.dumps(value)) == wanted


def test_what_stands_beside_a_reference_counts():
    schema = {"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n", "minimum": 2}}
    contract = Contract(schema)
    for value, wanted in (([2, 3], True), ([1], False), (["a"], False), ("no list", True)):
        assert contract.holds(value) == jsonschema.Draft202012Validator(schema).is_valid(value) == wanted
        assert (contract.faults(value) == []) == wanted


def test_a_schema_may_refer_to_itself():
    tree = Contract({"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False})
    value: dict = {}
    for _ in range(20):
        value = {"next": value}
    assert tree.holds(value) and not tree.faults(value)
    assert not tree.holds({"next": {"last": 1}}) and tree.faults({"next": {"last": 1}}) == [
        ("next.last", "is not known")
    ]


@pytest.mark.parametrize(
    ("schema", "code", "data"),
    [
        ({"minimun": 1}, "params.unread-word", ("the schema", "'minimun'", "'minimum'")),
        ({"properties": {"minimun": {"ifs": {}}}}, "params.unread-word", ("properties.minimun", "'ifs'")),
        ({"items": {"type": "int"}}, "params.no-schema", ("items.type", "'int'", "array, boolean")),
        ({"anyOf": [{"$ref": "#/$defs/x"}]}, "params.reference", ("'#/$defs/x'",)),
        ({"$ref": "http://elsewhere"}, "params.reference", ("'http://elsewhere'",)),
        ({"items": 3}, "params.no-schema", ("items ", "3", "object or boolean")),
        ({"pattern": "("}, "params.no-schema", ("pattern ", "'('", "'regex'")),
        ({"$schema": "draft-9"}, "params.no-schema", ("'draft-9'", "https")),
        ({"minimum": "1"}, "params.no-schema", ("minimum ", "'1'", "number")),
    ],
)
def test_a_word_that_is_not_read_is_refused_in_one_line(schema, code, data):
    with refused(ParamsError, code, *data) as caught:
        Contract(schema)
    assert len(caught.value.lines) == 1


def test_what_is_no_json_is_refused():
    number = Contract({"type": "number"})
    for value in (math.nan, math.inf, -math.inf):
        assert not number.holds(value) and number.faults(value)
        assert not Contract({}).holds([{"a": value}]) and Contract(True).holds(1)
    for text in ("NaN", "[Infinity]", "1e999", '{"a":1,"a":1}', "{", "[" * 100_000, b"\xff"):
        assert not Contract({}).reads(text)
        with refused(StorageError, "storage.not-json", "a.json"):
            decoded(text, "a.json")
    assert Contract({"items": {}}).faults([1, {"a": [math.nan]}]) == [("[1].a[0]", "is nan, which JSON does not have")]
    assert Contract({"type": "integer"}).holds(1.0) and not Contract({"type": "integer"}).holds(True)


def test_all_faults_are_told_each_in_a_line_with_its_place():
    person = Contract(PERSON)
    wrong = {"name": "", "age": 151, "mail": "x", "tags": ["a", "z"], "no": 1}
    assert set(person.faults(wrong)) == {
        ("name", "is '', allowed: minLength 1"),
        ("age", "is 151, allowed: maximum 150"),
        ("mail", r"is 'x', allowed: pattern '^[a-z]+@[a-z]+\\.(org|net)$'"),
        ("tags[1]", "is 'z', allowed: a, b, 1, None, {'x': [True]}"),
        ("no", "is not known"),
    }
    with pytest.raises(ContractBroken) as caught:
        person.refuse(wrong, "people.json")
    assert len(caught.value.lines) == 5 and all(line.startswith("people.json: ") for line in caught.value.lines)
    with pytest.raises(ContractBroken) as caught:
        Contract({"items": {"type": "null"}}).refuse([1] * 50, "x")
    assert caught.value.lines[-1] == "x: 30 more things are wrong"
    person.refuse({"name": "a", "tags": ["a"]}, "people.json")


@pytest.mark.parametrize(
    ("schema", "value", "faults"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "x", [("", "is 'x', allowed: integer or null")]),
        ({"anyOf": [{"const": "a"}, {"anyOf": [{"const": "b"}, False]}]}, "c",
         [("", "is 'c', allowed: a or b or nothing")]),
        ({"anyOf": [{"type": "array"}, {"required": ["a", "b"], "properties": {"a": {"type": "null"}}}]}, {"a": 1},
         [("b", "is missing"), ("a", "is 1, allowed: null")]),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1,
         [("", "is 1, allowed: one alternative alone, and several hold")]),
        ({"not": {"type": "null"}}, None, [("", "is None, allowed: not {'type': 'null'}")]),
        ({"patternProperties": {"^a": True}, "additionalProperties": False}, {"ab": 1, "b": 1},
         [("b", "is not known")]),
        ({"propertyNames": {"pattern": "^a"}}, {"b": 1}, [("", "is 'b', allowed: pattern '^a'")]),
        (False, 1, [("", "is 1, allowed: nothing")]),
        ({"pattern": "^[$]a$"}, "$a\n", [("", "is '$a\\n', allowed: pattern '^[$]a$'")]),
        ({"enum": [True]}, 1, [("", "is 1, allowed: True")]),
        ({"items": {"type": "integer"}}, (1, "a"), [("[1]", "is 'a', allowed: integer")]),
        ({"maxLength": 3}, "a" * 99, [("", f"is '{'a' * 56}..., allowed: maxLength 3")]),
    ],
)  # fmt: skip
def test_what_a_fault_says(schema, value, faults):
    assert Contract(schema).faults(value) == faults and not Contract(schema).holds(value)
    with pytest.raises(ContractBroken):
        Contract(schema).refuse(value, "x")


def test_what_lies_too_deep_is_refused_and_ends():
    value: dict = {}
    for _ in range(20_000):
        value = {"next": value}
    tree = Contract({"properties": {"next": {"$ref": "#"}}})
    assert not tree.holds(value) and tree.faults(value) == [("", "lies too deep, or its schema leads in a circle")]
    assert not Contract({"$ref": "#"}).holds(1)


def test_a_contract_is_compiled_once():
    assert Contract.of({"type": "null", "title": "a"}) is Contract.of({"title": "a", "type": "null"})


def test_the_shipped_files_keep_their_contracts():
    from kvlab_pipeline.cli.contracts import held, hold

    assert held(ROOT / "params.yaml") == "params"
    for name in ("mechanisms", "evals"):
        assert held(ROOT / "src" / "kvlab" / "gate" / "registry" / f"{name}.yaml") == name
    with refused(ContractBroken, None, "params.yaml: bits"):
        hold("params", yaml.safe_load((ROOT / "params.yaml").read_text()) | {"bits": "many"}, "params.yaml")


def test_a_json_file_is_read_strictly(tmp_path):
    from kvlab_pipeline.cli.contracts import held

    path = tmp_path / "results" / "gap" / "metrics" / "m.json"
    path.parent.mkdir(parents=True)
    with refused(StorageError, None, path, "No such file"):
        read_strictly(path)
    path.write_text('{"cells": [], "cells": []}')
    with refused(StorageError, "storage.not-json", path, "'cells'"):
        held(path)
    path.write_text('{"cells": []}')
    with refused(ContractBroken, None, f"{path}: identity"):
        held(path)


def test_the_rows_of_the_pipeline_keep_their_contract():
    from gate.planted_records import GOOD
    from gate.test_measured_rows import rows
    from kvlab_pipeline.cli.contracts import hold

    hold("rows", rows(GOOD), "m.json")
    with refused(ContractBroken, None, "m.json: [0].bitz"):
        hold("rows", [{"bitz": 1}], "m.json")


def test_a_file_without_a_contract_is_told(tmp_path):
    from kvlab.core.errors import UserError
    from kvlab_pipeline.cli.contracts import held

    with pytest.raises(UserError) as caught:
        held(tmp_path / "other.json")
    assert all(part in str(caught.value) for part in (str(tmp_path / "other.json"), "params.yaml"))
