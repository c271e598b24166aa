"""Block-sparse attention: its limits, its causality, and that three executors mean the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.drawing import after, draw
from kvlab.attention.block_sparse import BlockIndex, allowed, blocks_of, choose, sparsity
from kvlab.attention.grouped import attend, causal
from kvlab.attention.patterns import BlockSparse
from kvlab.core.errors import LayoutMismatch, UserError
from kvlab_mechanisms.attention.block_executors import EXECUTORS, gathered, masked
from refusals import refused

PATTERN = BlockSparse(block=8, top_k=2, window=8, sinks=1)
SCORES = pytest.mark.parametrize("score", ["mean", "bounds"])
ALL = pytest.mark.parametrize("name", list(EXECUTORS))


@ALL
@SCORES
def test_where_all_blocks_are_chosen_it_is_causal_attention(name, score):
    q, k, v = draw()
    found = EXECUTORS[name](q, k, v, BlockSparse(block=8, top_k=7, window=1, sinks=0, score=score))
    due = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(found, due, atol=1e-5)


@ALL
def test_without_blocks_it_is_a_sliding_window(name):
    q, k, v = draw()
    at = torch.arange(50)
    window = causal(at, 50) & (at[None] > at[:, None] - 12)
    found = EXECUTORS[name](q, k, v, BlockSparse(block=8, top_k=0, window=12, sinks=0))
    assert torch.allclose(found, attend(q, k, v, window), atol=1e-5)


@SCORES
@given(seed=st.integers(0, 10_000), t=st.integers(0, 48), name=st.sampled_from(["masked", "gathered"]))
def test_nothing_that_comes_later_moves_a_bit(score, seed, t, name):
    pattern = BlockSparse(block=8, top_k=2, window=3, sinks=1, score=score)
    q, k, v = draw(seed)
    before = EXECUTORS[name](q, k, v, pattern)[:, :, : t + 1]
    assert torch.equal(before, EXECUTORS[name](*after(t, q, k, v), pattern)[:, :, : t + 1])


def test_nor_by_flex_attention():
    q, k, v = draw()
    for t in (0, 7, 8, 30):
        before, now = (EXECUTORS["flexed"](*x, PATTERN)[:, :, : t + 1] for x in ((q, k, v), after(t, q, k, v)))
        assert torch.equal(before, now)


@SCORES
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 70),
    part=st.floats(0, 1),
    block=st.integers(1, 20),
    top_k=st.integers(0, 5),
    window=st.integers(1, 30),
    sinks=st.integers(0, 3),
)
def test_mask_and_gather_agree(score, seed, tokens, part, block, top_k, window, sinks):
    q, k, v = draw(seed, tokens, max(1, round(part * tokens)))
    pattern = BlockSparse(block, top_k, window, sinks, score)
    assert torch.allclose(masked(q, k, v, pattern), gathered(q, k, v, pattern), atol=1e-5)


def test_flex_agrees_too():
    for queries in (1, 20, 50):
        q, k, v = draw(queries=queries)
        assert torch.allclose(masked(q, k, v, PATTERN), EXECUTORS["flexed"](q, k, v, PATTERN), atol=1e-5)


def test_a_planted_key_is_found():
    q, k, _ = draw(tokens=200, queries=1, heads=2, kv_heads=1)
    k[0, 0, 40:48] = 3 * q[0, :, 0].mean(0)
    q[0, :] = q[0].mean(0)
    assert choose(q, k, BlockSparse(block=8, top_k=1, window=8, sinks=1)).numbers.item() == 5


@ALL
def test_shared_heads_are_repeated_heads(name):
    q, k, v = draw(heads=2, kv_heads=2)
    q, repeated = q.repeat_interleave(2, dim=1), [x.repeat_interleave(2, dim=1) for x in (k, v)]
    shared = EXECUTORS[name](q, k, v, PATTERN)  # each group is one query twice, so that its choice is the same
    assert torch.allclose(shared, EXECUTORS[name](q, *repeated, PATTERN), atol=1e-6)


@SCORES
def test_tokens_one_by_one_are_one_forward(score):
    pattern = BlockSparse(block=8, top_k=2, window=5, sinks=1, score=score)
    q, k, v = draw(tokens=60)
    whole, index = masked(q, k, v, pattern), BlockIndex(8)
    index.append(k[:, :, :30])
    assert torch.allclose(masked(q[:, :, :30], k[:, :, :30], v[:, :, :30], pattern), whole[:, :, :30], atol=1e-6)
    for t in range(30, 60):
        index.append(k[:, :, t : t + 1])
        held = k[:, :, : t + 1], v[:, :, : t + 1]
        found = gathered(q[:, :, t : t + 1], *held, pattern, blocks=index.blocks)
        assert torch.allclose(found, whole[:, :, t : t + 1], atol=1e-5)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_blocks_of_a_growing_cache_are_those_of_a_whole_one(lengths):
    _, k, _ = draw(tokens=sum(lengths))
    index, began = BlockIndex(8), 0
    for length in lengths:
        index.append(k[:, :, began : began + length])
        began += length
    for found, due in zip(index.blocks, blocks_of(k, 8), strict=True):
        assert torch.equal(found, due)


@given(tokens=st.integers(1, 90), top_k=st.integers(0, 6), sinks=st.integers(0, 2))
def test_sparsity_is_its_formula(tokens, top_k, sinks):
    q, k, _ = draw(tokens=tokens)
    read = allowed(q, k, pattern := BlockSparse(block=8, top_k=top_k, window=1, sinks=sinks))
    due = sum(t % 8 + 1 + 8 * min(top_k + sinks, t // 8) for t in range(tokens))
    assert sparsity(read) == pytest.approx(1 - due / (tokens * (tokens + 1) / 2))
    assert [int(x) for x in read[0, 0].sum(-1)] == [pattern.keys(t) for t in range(tokens)]


def test_dense_causal_attention_is_not_sparse():
    assert sparsity(causal(torch.arange(9), 9)[None, None]) == 0
    assert sparsity(causal(torch.arange(5, 9), 9)[None, None]) == 0


def test_what_cannot_be_is_refused():
    with refused(UserError, None, "block is 0", "a whole number, 1 or more"):
        BlockSparse(block=0)
    with refused(UserError, None, "'median'", "allowed: mean, bounds"):
        BlockSparse(score="median")
    q, k, v = draw()
    with refused(LayoutMismatch, "layout.queries", "50 queries", "9 keys"):
        masked(q, k[:, :, :9], v[:, :, :9], PATTERN)
    with refused(LayoutMismatch, "layout.heads", "3 query heads", "2 KV heads"):
        masked(q[:, :3], k, v, PATTERN)
