"""Answers of a transformers model hang on what its cache holds, scored and written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvlab.cache.hf.expected_fires import expected_fires
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.codecs.fp8 import Fp8Stream
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.klt import KltStream
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.core.model import load_tokenizer
from kvlab.core.recipe import Recipe
from kvlab.evals.backend import ScoreRequest, WriteRequest
from kvlab.evals.canary import ONE_BIT, Guard
from kvlab.evals.hf import CodedHFSide, HFSide, sides
from refusals import refused

CONTEXT, ANSWER = list(range(10, 50)), [7, 300, 21]
LOSSY = Recipe(k=HadamardStream(bits=2), v=HadamardStream(bits=2))
NO_END = frozenset()


@pytest.fixture(scope="module")
def tokenizer(hf_engine):
    return load_tokenizer(hf_engine.info)


@pytest.fixture
def plain(hf_engine, tokenizer):
    return HFSide(hf_engine, tokenizer, NO_END)


@pytest.fixture
def coded(hf_engine, tokenizer):
    return CodedHFSide(hf_engine, tokenizer, NO_END, LOSSY)


@torch.inference_mode()
def one_pass(engine, cache=None) -> list[float]:
    """The answer's log-probabilities from one forward over everything: the usual way to score."""
    ids = torch.tensor([CONTEXT + ANSWER])
    logits = engine.model(ids, past_key_values=cache, use_cache=cache is not None).logits[0].float().log_softmax(-1)
    return [float(logits[len(CONTEXT) - 1 + i, token]) for i, token in enumerate(ANSWER)]


def test_without_a_codec_two_calls_score_what_one_does(hf_engine, plain):
    (found,) = plain.score([ScoreRequest(CONTEXT, ANSWER)])
    assert found.logprobs == pytest.approx(one_pass(hf_engine), abs=1e-4)
    assert not found.greedy


def test_one_pass_over_a_coded_cache_is_blind_and_this_way_is_not(hf_engine, plain, coded):
    exact, blind = one_pass(hf_engine), one_pass(hf_engine, KVCache(hf_engine.model, LOSSY, semantics="serving"))
    assert blind == pytest.approx(exact, abs=1e-5)
    (found,) = coded.score([ScoreRequest(CONTEXT, ANSWER)])
    moved = [abs(a - b) for a, b in zip(found.logprobs, exact, strict=True)]
    assert min(moved) > 1e-3  # the first token too, all there is of a one-letter answer


@torch.inference_mode()
def test_it_is_what_a_coded_cache_says_when_asked_by_hand(hf_engine, coded):
    cache = KVCache(hf_engine.model, LOSSY, semantics="serving")
    hf_engine.model(torch.tensor([CONTEXT[:-1]]), past_key_values=cache)
    logits = hf_engine.model(torch.tensor([[CONTEXT[-1], *ANSWER[:-1]]]), past_key_values=cache).logits[0]
    by_hand = logits.float().log_softmax(-1).gather(1, torch.tensor(ANSWER)[:, None])[:, 0]
    (found,) = coded.score([ScoreRequest(CONTEXT, ANSWER)])
    assert found.logprobs == pytest.approx(by_hand.tolist(), abs=1e-4)


def test_answers_that_share_a_question_get_what_each_gets_alone(coded):
    requests = [
        ScoreRequest(CONTEXT, ANSWER),
        ScoreRequest(CONTEXT, [5]),
        ScoreRequest(CONTEXT[:-3], ANSWER),
        ScoreRequest(CONTEXT, ANSWER),
    ]
    together = coded.score(requests)
    assert together == [coded.score([request])[0] for request in requests]
    assert together[0] == together[3]


def test_written_greedily_and_scored_likewise(hf_engine, plain, coded, tokenizer):
    whole = hf_engine.model.generate(torch.tensor([CONTEXT]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    (found,) = plain.write([WriteRequest(CONTEXT, 6, [])])
    ids = whole[0, len(CONTEXT) :].tolist()
    assert found.text == tokenizer.decode(ids, skip_special_tokens=True)
    (scored,) = plain.score([ScoreRequest(CONTEXT, ids)])
    assert scored.greedy and scored.logprobs == pytest.approx(found.logprobs, abs=1e-4)
    (other,) = coded.write([WriteRequest(CONTEXT, 6, [])])
    assert other.logprobs[0] != pytest.approx(found.logprobs[0], abs=1e-3)  # the first token too


def test_writing_stops_at_an_end_or_a_stop(hf_engine, tokenizer, plain):
    (found,) = plain.write([WriteRequest(CONTEXT, 6, [])])
    first = plain.score([ScoreRequest(CONTEXT, [0])]) and tokenizer.encode(found.text)[0]
    ended = HFSide(hf_engine, tokenizer, frozenset(range(tokenizer.vocab_size)))
    assert len(ended.write([WriteRequest(CONTEXT, 6, [])])[0].logprobs) == 1
    stop = tokenizer.decode([first])
    assert stop in plain.write([WriteRequest(CONTEXT, 6, [stop])])[0].text


def test_a_context_of_one_token_is_refused(plain):
    with refused(CapabilityError, "capability.reads-nothing", "one token"):
        plain.score([ScoreRequest([5], ANSWER)])


@pytest.mark.parametrize(
    "recipe",
    [
        LOSSY,
        Recipe(k=IntStream(bits=2, block_size=8), v=IdentityStream()),
        Recipe(k=KiviStream(bits=2, axis="channel", block_size=8, group=8), v=KiviStream(bits=2, axis="token")),
        Recipe(k=Fp8Stream(block_size=16), v=Fp8Stream(block_size=7)),
    ],
    ids=["hadamard", "int-blocks", "kivi", "fp8"],
)
def test_codecs_fire_as_often_as_the_calls_ask_for(hf_engine, tokenizer, recipe):
    side = CodedHFSide(hf_engine, tokenizer, NO_END, recipe)
    side.score([ScoreRequest(CONTEXT, ANSWER), ScoreRequest(CONTEXT, [5])])
    side.write([WriteRequest(CONTEXT, 10, [])])
    seen = side.seen()
    assert seen.fires == seen.expected_fires > 0
    calls = (len(CONTEXT) - 1 + len(ANSWER)) + len(CONTEXT) + (len(CONTEXT) - 1 + 10)
    assert seen.kv_values == calls * hf_engine.info.values_per_token
    assert 0 < 8 * seen.kv_bytes / seen.kv_values < 32
    side.begin()
    assert side.seen() == (0, 0, 0, 0)


def test_calibrated_codecs_too(hf_engine, tokenizer, tiny_calibration):
    from kvlab.calibration.load import FittedFiles, load

    fitted = FittedFiles(tiny_calibration["sigma"], components=tiny_calibration["components"])
    recipe = Recipe(k=KltStream(bits=3), v=KltStream(bits=3))
    side = CodedHFSide(hf_engine, tokenizer, NO_END, recipe, load(fitted, hf_engine.info.model_hash))
    side.write([WriteRequest(CONTEXT, 4, [])])
    assert side.seen().fires == side.seen().expected_fires == 2 * 3 * (1 + 4)


def test_fires_that_are_due_are_counted_from_the_calls_alone():
    def coder(per_token: bool, size: int | None, joiner: object = object(), loose: int = 0):
        return SimpleNamespace(codec=SimpleNamespace(per_token=per_token), size=size, joiner=joiner, loose=loose)

    assert expected_fires(coder(True, None), [30, 1, 1]) == 3
    assert expected_fires(coder(True, 8), [8, 1, 1]) == 3
    assert expected_fires(coder(True, 8), [7, 2]) == 3  # the second call ends a block and begins one
    assert expected_fires(coder(True, 8, None), [17, 1]) == 4
    assert expected_fires(coder(True, 8, loose=4), [3, 1, 1, 9, 3]) == 6  # nine begin two blocks, wherever they come
    assert expected_fires(coder(False, 8), [7, 2, 6]) == 1
    assert expected_fires(coder(False, 8), [7, 2, 7]) == 2


def test_a_codec_that_fires_otherwise_is_no_measurement(coded, monkeypatch):
    monkeypatch.setattr("kvlab.cache.hf.expected_fires.expected_fires", lambda *_: 99)
    with refused(CodecNotActive, "not-active.fires", "99 were due"):
        coded.score([ScoreRequest(CONTEXT, ANSWER)])


def test_a_block_longer_than_the_text_is_a_codec_that_never_ran(hf_engine, tokenizer):
    side = CodedHFSide(hf_engine, tokenizer, NO_END, Recipe(k=Fp8Stream(), v=Fp8Stream()))
    with refused(CodecNotActive, "not-active.nothing-coded", "a block has 512"):
        side.score([ScoreRequest(CONTEXT, ANSWER)])


@pytest.mark.parametrize("kind", ["score", "write"])
def test_the_canaries_pass_here_and_not_where_the_model_ignores_its_cache(hf_engine, tokenizer, kind, monkeypatch):
    found = sides(hf_engine, tokenizer, NO_END, LOSSY, None)
    assert found.one_bit.keys() == ONE_BIT.keys()
    Guard(found).check(kind, CONTEXT)
    assert found.variant.seen() == (0, 0, 0, 0)
    monkeypatch.setattr(CodedHFSide, "_empty", HFSide._empty)  # the plain cache in the codec's place
    monkeypatch.setattr(CodedHFSide, "_account", HFSide._account)
    with refused(CodecNotActive, "not-active.canary", "on K "):
        Guard(sides(hf_engine, tokenizer, NO_END, LOSSY, None)).check(kind, CONTEXT)
