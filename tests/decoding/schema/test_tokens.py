"""Tokens under a schema: masks are xgrammar's bit by bit, what is generated is valid, the end stands when complete."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlab.core.errors import ParamsError, UnknownName
from kvlab_mechanisms.decoding.schema.automaton import Automaton
from kvlab_mechanisms.decoding.schema.constrained import constrained, token_bytes
from kvlab_mechanisms.decoding.schema.json_schema import language
from kvlab_mechanisms.decoding.schema.tokens import END, TokenIndex

xgrammar = pytest.importorskip("xgrammar")

SHARED = [  # what both spell alike; xgrammar lets control characters into strings of a length, which json refuses
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "x": {"type": "number"},
     "ok": {"type": "boolean"}}, "required": ["name", "x"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["a", "bé", 1, None, True]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "integer", "minimum": -5, "maximum": 120}, {"const": "no \"way\""}, {"type": "null"}]},
    {"type": "string", "pattern": "^[a-c]+[0-9]{2}$"},
    {"type": "object", "properties": {"v": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}},
     "required": ["v"], "additionalProperties": False},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(root):
    return AutoTokenizer.from_pretrained(root / "models" / "reference")


@pytest.fixture(scope="module")
def info(tokenizer):
    return xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))


def index_of(schema, tokenizer) -> TokenIndex:
    return TokenIndex(Automaton(language(schema)), token_bytes(tokenizer), tokenizer.eos_token_id)


def test_the_bytes_of_tokens_are_xgrammars(tokenizer, info):
    special = set(tokenizer.all_special_ids)
    ours, theirs = token_bytes(tokenizer), info.decoded_vocab
    assert [a for i, a in enumerate(ours) if i not in special] == [b for i, b in enumerate(theirs) if i not in special]


@pytest.mark.parametrize("schema", SHARED, ids=[str(i) for i in range(len(SHARED))])
def test_masks_are_xgrammars_bit_by_bit(schema, tokenizer, info):
    how = {"any_whitespace": False, "separators": (",", ":")}
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema), **how)
    index, chance = index_of(schema, tokenizer), random.Random(0)
    for _ in range(12):
        matcher, state = xgrammar.GrammarMatcher(compiled), index.start
        for _step in range(25):
            theirs = xgrammar.allocate_token_bitmask(1, len(tokenizer))
            matcher.fill_next_token_bitmask(theirs)
            assert (index.mask(state).view(np.int32) == theirs[0].numpy()).all()
            token = chance.choice(sorted(index.after(state)))
            if token == index.eos:
                break
            assert matcher.accept_token(token)
            state = index.advance(state, token)


@pytest.mark.parametrize("schema", SHARED, ids=[str(i) for i in range(len(SHARED))])
def test_walks_by_token_end_in_valid_texts(schema, tokenizer):
    index, chance, texts = index_of(schema, tokenizer), random.Random(1), token_bytes(tokenizer)
    check = jsonschema.Draft202012Validator(schema)
    for _ in range(100):
        state, raw = index.start, b""
        while state != END:
            allowed = sorted(index.after(state))
            if len(raw) > 80:  # to an end
                allowed = [t for t in allowed if t == index.eos or set(texts[t]) <= set(b'"]},0')] or allowed
            token = index.eos if index.eos in allowed and chance.random() < 0.4 else chance.choice(allowed)
            assert (index.eos in index.after(state)) == index.automaton.matches(raw)
            state, raw = index.advance(state, token), raw + (texts[token] or b"")
        assert check.is_valid(json.loads(raw)), raw


def test_states_do_not_change_and_what_is_not_allowed_is_refused(tokenizer):
    index = index_of(SHARED[0], tokenizer)
    before = index.mask(index.start).copy()
    logits = torch.zeros(len(tokenizer) + 5)
    assert torch.isfinite(index.constrain(logits, index.start)).sum() == len(index.after(index.start))
    token = next(iter(index.after(index.start)))
    assert index.advance(index.start, token) == index.advance(index.start, token)
    assert (index.mask(index.start) == before).all()
    with pytest.raises(ParamsError, match="not allowed"):
        index.advance(index.start, index.eos)
    assert hash(index.start) == hash(index.start + 0)
    assert index.mask(END).sum() == 0
    assert index.forced(index.start) == b'{"name":"'
    with pytest.raises(ParamsError, match="vocabulary"):
        TokenIndex(index.automaton, [b"a"], 1)


@pytest.mark.parametrize("backend", ["reference", "xgrammar"])
def test_a_model_writes_what_the_schema_allows(backend, root, tokenizer):
    schema = {"type": "array", "items": {"enum": ["red", "green", 3]}, "minItems": 2, "maxItems": 4}
    model = AutoModelForCausalLM.from_pretrained(root / "models" / "reference", dtype=torch.float32)
    torch.manual_seed(0)
    prompt = tokenizer("colours: ", return_tensors="pt").input_ids.expand(3, -1)
    processor = constrained(schema, tokenizer, model.config.vocab_size, backend)
    how = {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "eos_token_id": tokenizer.eos_token_id}
    written = model.generate(prompt, logits_processor=[processor], pad_token_id=tokenizer.eos_token_id, **how)
    for row in written[:, prompt.shape[1] :]:
        jsonschema.validate(json.loads(tokenizer.decode(row, skip_special_tokens=True)), schema)
    with pytest.raises(UnknownName):
        constrained(schema, tokenizer, 10, "outlines")
