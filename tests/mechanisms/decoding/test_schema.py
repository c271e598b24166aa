"""Texts of a schema: exactly the valid ones in their one spelling, and what is not kept is refused by its place."""

from __future__ import annotations

import itertools
import json
import random
import sys

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlab.core.errors import CapabilityError, ParamsError
from kvlab_mechanisms.decoding.schema import Steps, compiled, constrained, tokens, tokens_of
from refusals import refused

pytestmark = pytest.mark.full

pytest.importorskip("xgrammar")

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
NUMBERS = {
    "type": "array",
    "items": {"anyOf": [
        {"type": "number", "minimum": -1.5, "maximum": 20}, {"type": "number", "exclusiveMinimum": 0.25},
        {"type": "integer", "exclusiveMinimum": -7, "exclusiveMaximum": 1000},
    ]},
}  # fmt: skip
PATTERNS = {
    "type": "array",
    "items": {"anyOf": [{"type": "string", "pattern": source} for source in (
        "^a|b$", "\\d{2}\\.\\w", "^[^a\\n]{1,3}$", "(?:x|yy)*", "[!-~]", ".", "^\\s?[\\w.-]+$", "z{2,}")]},
    "minItems": 1,
}  # fmt: skip
NAMED = {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "boolean"}}}
SCHEMAS = {"person": PERSON, "tree": TREE, "mixed": MIXED, "numbers": NUMBERS, "patterns": PATTERNS, "named": NAMED,
           "any": True}  # fmt: skip
BYTES = tokens([*(bytes([byte]) for byte in range(255)), None], [255])
END = 255
LOOSE = {0xE0, 0xED, 0xF0}  # after these xgrammar also allows bytes that are no UTF-8 (docs/mechanisms.md)


def allowed(steps: Steps) -> list[int]:
    return steps.constrain(torch.zeros(256)).isfinite().nonzero().flatten().tolist()


def walked(grammar, chance: random.Random) -> bytes:
    """A random text; after a while it takes the way to an end that is nearest at hand."""
    steps, raw = Steps(grammar), bytearray()
    while True:
        able = allowed(steps)
        if END in able and (len(able) == 1 or chance.random() < 0.3 or len(raw) > 60):
            steps.advance(END)
            assert steps.ended and not steps.mask().any() and steps.forced() == ""
            return bytes(raw)
        able = [byte for byte in able if byte != END and byte not in LOOSE]
        if len(raw) > 60:
            able = (
                [byte for byte in able if byte in b'"]},'] or [byte for byte in able if byte in b"0123456789"] or able
            )
        raw.append(chance.choice(able))
        steps.advance(raw[-1])
        assert len(raw) < 2000


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_walks_are_valid(name):
    grammar, chance = compiled(SCHEMAS[name], BYTES), random.Random(name)
    check = jsonschema.Draft202012Validator(SCHEMAS[name])
    for _ in range(150):
        text = walked(grammar, chance).decode()
        assert check.is_valid(json.loads(text)), text


EQUAL = [
    ({"type": "integer", "minimum": -12, "maximum": 21}, "0123-"),
    ({"type": "integer", "exclusiveMinimum": 9}, "0129-"),
    ({"type": "integer", "maximum": -10}, "0129-"),
    ({"type": "string", "minLength": 1, "maxLength": 2}, "ab\""),
    ({"type": "string", "pattern": "^a(b|ba)+$"}, 'ab"'),
    ({"type": "string", "pattern": "^(?:a|b{2,3})?$"}, 'ab"'),
    ({"type": ["string", "null"]}, 'nul"'),
    ({"enum": [1, "1", [1], 11]}, '1"[]'),
    ({"type": ["integer", "string"], "enum": [1, "1", 11]}, '1"true'),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, "[1,0]"),
    ({"type": "array", "items": {"type": "array", "items": {"const": 1}, "maxItems": 1}}, "[1,]"),
    ({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 1}}, "required": ["b"],
      "additionalProperties": False}, '{"ab:1,}'),
    ({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False}, '{"a:1}'),
    ({"anyOf": [{"const": 1}, {"type": "integer", "minimum": 20, "maximum": 22}]}, "012"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "alphabet"), EQUAL, ids=[str(i) for i in range(len(EQUAL))])
def test_the_texts_are_the_valid_ones_in_their_one_spelling(schema, alphabet):
    steps, check = Steps(compiled(schema, BYTES)), jsonschema.Draft202012Validator(schema)
    alphabet, longest = sorted(set(alphabet)), 13 if "{" in alphabet else 6
    found: set[str] = set()

    def go(text: str) -> None:
        able = allowed(steps)
        found.update({text} if END in able else ())
        for sign in alphabet if len(text) < longest else ():
            if ord(sign) in able:
                steps.advance(ord(sign))
                go(text + sign)
                steps.back()

    go("")
    assert found == {text for text in texts(alphabet, longest) if valid(text, check)}
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
    spelled = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return in_order and spelled == text and check.is_valid(value)


def once(pairs):
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


@pytest.mark.parametrize(
    ("schema", "code", "data"),
    [
        (3, "params.no-schema", ("# ", 3, "'object', 'boolean'")),
        ({"type": "text"}, "params.no-schema", ("#.type ", "'text'", "string, integer")),
        ({"type": "string", "maxlength": 3}, "params.unread-word", ("'maxlength'", "'maxLength'")),
        ({"type": "array", "items": {"type": "string", "maxItems": 3}},
         "params.unread-word", ("#/items ", "'maxItems'")),
        ({"minimum": 3}, "params.unread-word", ("'minimum'", "none: nothing")),
        ({"not": {"type": "null"}}, "params.unread-word", ("'not'",)),
        ({"type": "array", "uniqueItems": True}, "params.unread-word", ("'uniqueItems'",)),
        ({"type": "number", "multipleOf": 2}, "params.unread-word", ("'multipleOf'",)),
        ({"oneOf": [{"type": "null"}]}, "params.unread-word", ("'oneOf'",)),
        ({"type": "string", "format": "email"}, "params.unread-word", ("'format'",)),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "params.words-together", ("anyOf, type ", "anyOf alone")),
        ({"$ref": "#", "minimum": 1}, "params.words-together", ("$ref, minimum ",)),
        ({"type": "string", "enum": ["a", 1]}, "params.listed-value", (" 1;", "string")),
        ({"type": "object", "properties": {"ab": {}}, "required": ["abc"]},
         "params.required-property", ("'abc'", "'ab'")),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": {}},
         "params.other-properties", ("additionalProperties false",)),
        ({"type": "string", "pattern": "a", "minLength": 1}, "params.pattern-and-length", ("# ",)),
        ({"type": "string", "pattern": "a{129}"}, "params.pattern-repeats", ("'a{129}'", 128)),
        ({"$ref": "#/$defs/nowhere"}, "params.grammar", ("Cannot find field",)),
        ({"$ref": "http://elsewhere"}, "params.reference", ("# ", "'http://elsewhere'", "#, #/$defs/NAME")),
        ({"anyOf": [{"$ref": "#/default"}], "default": {}}, "params.reference", ("#/anyOf/0 ", "'#/default'")),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "params.grammar", ("minimum greater than maximum",)),
        ({"$defs": {"a": {"type": "x"}}, "$ref": "#/$defs/a"}, "params.no-schema", ("#['$defs'].a.type ",)),
        (False, "params.grammar", ("cannot accept any value",)),
        ({"type": 3}, "params.no-schema", ("#.type ", 3)),
        ({"type": ["null", {}]}, "params.no-schema", ("#.type ", ["null", {}])),
        ({"type": "string", "pattern": 3}, "params.no-schema", ("#.pattern ", 3, "'string'")),
        ({"anyOf": {"type": "null"}}, "params.no-schema", ("#.anyOf ",)),
        ({"type": "object", "properties": []}, "params.no-schema", ("#.properties ",)),
        ({"type": "string", "minLength": "a"}, "params.no-schema", ("#.minLength ", "'a'")),
        ({"type": "array", "minItems": -1}, "params.no-schema", ("#.minItems ", -1)),
        ({"enum": []}, "params.grammar", ("enum",)),
    ],
)  # fmt: skip
def test_what_is_not_kept_is_refused_in_one_line(schema, code, data):
    with refused(ParamsError, code, *data) as caught:
        compiled(schema, BYTES)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    "source",
    [
        *('a"b', "a\\\\b", "a\\n", "a\nb", "(?=a)", "(?i)a", "a^b", "a$b", "(^a)"),
        *("\\W", "[^\\d]", "(a)\\1", "\\bx", "[\\S]"),
    ],
)
def test_patterns_that_would_be_read_otherwise_are_refused(source):
    with refused(ParamsError, "params.pattern", repr(source)):
        compiled({"type": "string", "pattern": source}, BYTES)


def test_a_schema_or_vocabulary_without_texts_is_refused():
    with refused(CapabilityError, "capability.no-token"):
        compiled({"$ref": "#"}, BYTES)
    with refused(CapabilityError, "capability.no-token"):
        compiled({"const": "a"}, tokens([b"{", None], [1]))
    with refused(ParamsError, "params.end-tokens", [1], "from 0 to 0"):
        tokens([b"a"], [1])


def test_control_characters_are_never_allowed():
    steps = Steps(compiled({"type": "string", "minLength": 1, "maxLength": 9}, BYTES))
    steps.advance(ord('"'))
    assert min(allowed(steps)) == ord(" ")


def test_what_leaves_the_schema_is_refused_and_changes_nothing():
    steps = Steps(compiled(PERSON, BYTES))
    logits = steps.constrain(torch.zeros(300))
    assert logits.isfinite().nonzero().flatten().tolist() == [ord("{")]
    assert steps.mask().dtype == torch.int32 and steps.mask().shape == (8,)
    before = steps.mask().clone()
    for token in (END, ord("}"), 256, -1):
        with refused(ParamsError, "params.token-not-allowed", f"token {token} "):
            steps.advance(token)
    assert (steps.mask() == before).all()
    assert steps.forced() == '{"name":"'
    for byte in b'{"name":"':
        steps.advance(byte)
    steps.back(8)
    assert allowed(steps) == [ord('"')] and steps.forced() == '"name":"'
    assert allowed(Steps(compiled(PERSON, BYTES))) == [ord("{")]


@pytest.fixture(scope="module")
def tokenizer(root):
    return AutoTokenizer.from_pretrained(root / "models" / "reference")


def test_a_tokenizers_special_tokens_are_no_text(tokenizer):
    info = tokens_of(tokenizer, len(tokenizer) + 7)
    assert info.vocab_size == len(tokenizer) + 7 and info.stop_token_ids == [tokenizer.eos_token_id]
    steps = Steps(compiled({"type": "string"}, info))
    quote = tokenizer.convert_tokens_to_ids('"')
    steps.advance(quote)
    open_ = steps.constrain(torch.zeros(info.vocab_size)).isfinite()
    assert open_.sum() > 100 and not open_[tokenizer.all_special_ids].any() and not open_[len(tokenizer) :].any()
    texts = info.decoded_vocab
    assert all(min(texts[token]) >= 0x20 for token in open_.nonzero().flatten().tolist())


def test_a_model_writes_what_the_schema_allows(root, tokenizer):
    schema = {"type": "array", "items": {"enum": ["red", "green", 3]}, "minItems": 2, "maxItems": 4}
    model = AutoModelForCausalLM.from_pretrained(root / "models" / "reference", dtype=torch.float32)
    torch.manual_seed(0)
    prompt = tokenizer("colours: ", return_tensors="pt").input_ids.expand(3, -1)
    processor = constrained(schema, tokenizer, model.config.vocab_size)
    how = {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "eos_token_id": tokenizer.eos_token_id}
    written = model.generate(prompt, logits_processor=[processor], pad_token_id=tokenizer.eos_token_id, **how)
    for row in written[:, prompt.shape[1] :]:
        jsonschema.validate(json.loads(tokenizer.decode(row, skip_special_tokens=True)), schema)


def test_where_xgrammar_is_missing_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with refused(CapabilityError, "capability.missing-package", "xgrammar", "kvlab[mechanisms]"):
        tokens([b"a", None], [1])
