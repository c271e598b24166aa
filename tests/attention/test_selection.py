"""Which tokens stay: budgets that hold, formulas against their sources."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention.selection import (
    large_embeddings,
    latest,
    pooled_attention,
    recency,
    select,
    self_information,
    small_keys,
    stride,
    tf_idf,
)
from kvlab.core.errors import LayoutMismatch
from refusals import refused

SCORES = st.lists(st.integers(-3, 3), max_size=30)


@settings(deadline=None, max_examples=100)
@given(scores=SCORES, budget=st.integers(0, 40), sinks=st.integers(0, 9), recent=st.integers(0, 9))
def test_as_many_as_there_is_room_for_in_their_order(scores, budget, sinks, recent):
    tokens = len(scores)
    kept = select(torch.tensor(scores, dtype=torch.float64), budget, sinks, recent).tolist()
    assert len(kept) == min(tokens, budget)
    assert kept == sorted(set(kept))
    recent = min(recent, budget, tokens)
    assert set(range(tokens - recent, tokens)) <= set(kept)
    assert set(range(min(sinks, min(budget, tokens) - recent))) <= set(kept)
    gone = set(range(tokens)) - set(kept)
    middle = set(kept) - set(range(sinks)) - set(range(tokens - recent, tokens))
    # nobody who went had more than one who stayed by score, and of equals the earlier stayed
    assert all((scores[m], -m) > (scores[g], -g) for m in middle for g in gone)


def test_recency_is_the_tail_and_all_stay_where_there_is_room():
    assert select(recency(10), 4).tolist() == [6, 7, 8, 9]
    assert select(recency(10), 10).tolist() == list(range(10))
    assert select(recency(10), 4, sinks=2).tolist() == [0, 1, 8, 9]


@given(tokens=st.integers(0, 30), budget=st.integers(0, 40), sinks=st.integers(0, 9))
def test_the_latest_need_no_scores(tokens, budget, sinks):
    wanted = select(recency(tokens), budget, sinks)
    assert torch.equal(latest(tokens, budget, sinks), wanted)


@pytest.mark.parametrize(("tokens", "budget"), [(10, 3), (7, 7), (5, 9), (0, 3), (5, 0), (100, 33)])
def test_a_stride_marks_as_many_as_the_budget(tokens, budget):
    scores = stride(tokens, budget)
    assert int(scores.sum()) == min(tokens, budget)
    kept = select(scores, budget)
    assert torch.equal(kept, scores.nonzero().flatten())
    if tokens > budget > 1:
        assert kept.diff().max() - kept.diff().min() <= 1


def test_norms():
    k = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 3.0]]])
    assert small_keys(k).tolist() == [-2.5, -2.0]
    assert large_embeddings(k[0]).tolist() == [5.0, 1.0]


def test_self_information_is_what_the_model_did_not_expect():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1.0, 1.0, 1.0]]))
    told = self_information(logits, torch.tensor([2, 1, 0]))
    assert told[0] == math.inf
    assert told[1:].tolist() == pytest.approx([-math.log(0.25), -math.log(0.1)])


def test_pooled_attention_keeps_phrases():
    weights = torch.zeros(2, 3, 9)
    weights[:, :, 4] = 0.6
    weights[0, 0, 8] = 0.6
    found = pooled_attention(weights, 3)
    assert found.tolist() == pytest.approx([0, 0, 0, 0.6, 0.6, 0.6, 0, 0.1, 0.1])
    with refused(LayoutMismatch, "layout.even-width", 4):
        pooled_attention(weights, 4)


def test_tf_idf_by_hand():
    # two lines; "a" is in both: idf 1; "b" and "c" in one of two: idf ln(3/2) + 1
    rare = math.log(3 / 2) + 1
    one, two = math.hypot(2, rare), math.hypot(1, rare)
    found = tf_idf([["a", "b", "a"], ["c", "a"]])
    assert found.tolist() == pytest.approx([2 / one, rare / one, 2 / one, rare / two, 1 / two], abs=1e-12)


def test_tf_idf_is_that_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.feature_extraction.text")
    lines = ["the cat sat on the mat", "the dog sat", "a mat and a dog and a cat"]
    segments = [line.split() for line in lines]
    vectors = sklearn.TfidfVectorizer(token_pattern=r"\S+").fit(lines)
    dense = vectors.transform(lines).toarray()
    wanted = [dense[i, vectors.vocabulary_[word]] for i, words in enumerate(segments) for word in words]
    assert tf_idf(segments).tolist() == pytest.approx(wanted, abs=1e-9)


def test_scores_are_one_number_a_token():
    with pytest.raises(LayoutMismatch):
        select(torch.zeros(2, 3), 1)
