"""What the harness asks, as requests: cut, guarded, greedy, and never past the cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from lm_eval.api.instance import Instance

from kvlab.core.errors import CapabilityError, ParamsError
from kvlab.core.model import load_tokenizer, resolve
from kvlab.evals.backend import CacheUse, ScoreResult, Side, WriteResult
from kvlab.evals.lm import CachedLM
from refusals import refused


class Recorder(Side):
    """Keeps what it is asked, and answers ``one. two``."""

    what, kv_cache_dtype, cache_class = "no codec", "bfloat16", "Recorder"

    def __init__(self):
        self.asked = []

    def score(self, requests):
        self.asked += requests
        return [ScoreResult([-1.0] * len(request.continuation), True) for request in requests]

    def write(self, requests):
        self.asked += requests
        return [WriteResult("one. two", [-1.0, -1.0, -1.0]) for _ in requests]

    def begin(self):
        pass

    def seen(self):
        return CacheUse(0, 0, 0, 0)


@pytest.fixture(scope="module")
def tokenizer(tiny_params):
    return load_tokenizer(resolve(tiny_params.model))


@pytest.fixture
def lm(tokenizer):
    return CachedLM(Recorder(), tokenizer, 64)


def asked(kind: str, *arguments) -> Instance:
    return Instance(kind, {}, arguments, 0, ("toy", 0, 1))


def written(text: str, **options) -> Instance:
    return asked("generate_until", text, {"until": [".", ""], "max_gen_toks": 4} | options)


def test_a_question_and_its_answer_are_split_where_the_answers_tokens_begin(lm, tokenizer):
    assert lm.loglikelihood([asked("loglikelihood", "the input", " array")], disable_tqdm=True) == [
        (-1.0 * len(lm.side.asked[0].continuation), True)
    ]
    request = lm.side.asked[0]
    assert request.context + request.continuation == tokenizer.encode("the input array")
    assert lm.longest == len(tokenizer.encode("the input array"))


def test_what_is_too_long_loses_its_beginning_and_is_counted(lm, tokenizer):
    text = "word " * 100
    lm.loglikelihood([asked("loglikelihood", text, "end")], disable_tqdm=True)
    lm.generate_until([written(text)])
    scored, wrote = lm.side.asked
    assert len(scored.context) + len(scored.continuation) == 63
    assert len(wrote.context) == 60 and wrote.context == tokenizer.encode(text)[-60:]
    assert lm.cut == 2


def test_an_answer_ends_where_the_task_says_and_the_rest_is_not_kept(lm, tokenizer):
    assert lm.generate_until([written("some text")]) == ["one"]
    assert lm.side.asked[0].stops == [".", tokenizer.eos_token] and lm.side.asked[0].tokens == 4
    assert lm.written == 3


@pytest.mark.parametrize(
    ("options", "code", "data"),
    [
        ({"do_sample": True, "temperature": 0.7}, "capability.sampling", "temperature 0.7"),
        ({"temperature": 0.2}, "capability.sampling", "temperature 0.2"),
        ({"num_beams": 4}, "capability.generation-option", "num_beams"),
        ({"repetition_penalty": 1.1}, "capability.generation-option", "repetition_penalty"),
    ],
)
def test_answers_that_are_not_greedy_are_refused(lm, options, code, data):
    with refused(CapabilityError, code, data):
        lm.generate_until([written("some text", **options)])
    assert lm.side.asked == []


def test_greedy_may_be_said_in_every_way(lm):
    lm.generate_until([written("a b", do_sample=False), written("a b", do_sample=False, temperature=0.0, top_p=1.0)])
    assert len(lm.side.asked) == 2


def test_whole_texts_in_one_pass_are_refused(lm):
    with refused(CapabilityError, "capability.reads-nothing", "'toy'", "allowed: generate_until"):
        lm.loglikelihood_rolling([asked("loglikelihood_rolling", "a text")])


def test_answers_that_leave_no_room_for_a_question_are_refused(lm):
    with refused(ParamsError, "params.long-answer", "up to 64 tokens"):
        lm.generate_until([written("some text", max_gen_toks=64)])
    with refused(ParamsError, "params.long-answer", "into 64"):
        lm.loglikelihood([asked("loglikelihood", "a", " word" * 100)], disable_tqdm=True)


def test_a_length_that_no_request_comes_near_is_refused_before_anything_is_asked(tokenizer):
    lm = CachedLM(Recorder(), tokenizer, 64, least=20)
    with refused(ParamsError, "params.short-requests", "--context-tokens"):
        lm.generate_until([written("short")])
    assert lm.side.asked == []


def test_the_guard_is_asked_first_on_the_longest_text_of_each_kind(tokenizer):
    seen = []
    lm = CachedLM(Recorder(), tokenizer, 64, guard=SimpleNamespace(check=lambda *given: seen.append(given)))
    lm.generate_until([written("one"), written("one two three four five")])
    lm.loglikelihood([asked("loglikelihood", "one two", " three")], disable_tqdm=True)
    assert seen == [
        ("write", tokenizer.encode("one two three four five")),
        ("score", tokenizer.encode("one two three")),
    ]
