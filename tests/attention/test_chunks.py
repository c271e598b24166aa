"""Summaries of chunks, and dual-chunk positions: exact where they should be, and causal."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.drawing import after, draw, rotate
from kvlab.attention.chunk_summary import attend_summaries, reads, summaries_of
from kvlab.attention.grouped import attend, causal
from kvlab.attention.patterns import ChunkSummary
from kvlab.core.errors import UserError
from kvlab_mechanisms.attention.dual_chunk import dual_chunk, merged, part, query_positions
from refusals import refused

PATTERN = ChunkSummary(chunk=8, top_k=2, exact=1, sinks=1)


def test_equal_keys_are_summed_exactly():
    q, k, v = draw(tokens=48)
    k = k[:, :, ::8].repeat_interleave(8, dim=2)  # all keys of a chunk are one
    found = attend_summaries(q, k, v, ChunkSummary(chunk=8, top_k=6, exact=0, sinks=0))
    assert torch.allclose(found, attend(q, k, v), atol=1e-5)


def test_equal_values_come_out_as_they_are():
    q, k, v = draw()
    found = attend_summaries(q, k, torch.ones_like(v), PATTERN)
    assert torch.allclose(found, torch.ones_like(found), atol=1e-6)


def test_without_a_past_it_is_causal_attention():
    q, k, v = draw(tokens=8)
    due = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(attend_summaries(q, k, v, PATTERN), due, atol=1e-6)


def test_without_summaries_each_chunk_reads_itself():
    q, k, v = draw()
    at = torch.arange(50)
    own = causal(at, 50) & (at[None] // 8 == at[:, None] // 8)
    found = attend_summaries(q, k, v, ChunkSummary(chunk=8, top_k=0, exact=0, sinks=0))
    assert torch.allclose(found, attend(q, k, v, own), atol=1e-6)


@given(seed=st.integers(0, 10_000), t=st.integers(0, 48))
def test_nothing_that_comes_later_moves_a_bit(seed, t):
    q, k, v = draw(seed)
    before = attend_summaries(q, k, v, PATTERN)[:, :, : t + 1]
    assert torch.equal(before, attend_summaries(*after(t, q, k, v), PATTERN)[:, :, : t + 1])


def test_tokens_one_by_one_are_one_forward_and_heads_are_repeated_heads():
    q, k, v = draw(heads=2)
    whole = attend_summaries(q, k, v, PATTERN)
    for t in range(50):
        found = attend_summaries(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], PATTERN)
        assert torch.allclose(found, whole[:, :, t : t + 1], atol=1e-5)
    twice = [x.repeat_interleave(2, dim=1) for x in (q, k, v)]
    shared = attend_summaries(twice[0], k, v, PATTERN)
    assert torch.allclose(shared, attend_summaries(*twice, PATTERN), atol=1e-6)


@given(tokens=st.integers(1, 90), top_k=st.integers(0, 4), exact=st.integers(0, 2), sinks=st.integers(0, 2))
def test_what_is_read_is_what_the_pattern_counts(tokens, top_k, exact, sinks):
    q, k, v = draw(tokens=tokens)
    pattern = ChunkSummary(8, top_k, exact, sinks)
    read = reads(q, k, pattern, summaries_of(k, v, 8), 1.0)
    counted = read.keys.sum(-1) + read.chunks[0, 0].sum(-1)
    assert counted.tolist() == [pattern.keys(t) for t in range(tokens)]


# ------------------------------------------------------------------------------------------------- dual chunk


def plain(q, k, v):
    at = torch.arange(k.shape[2])
    return attend(rotate(q, at[-q.shape[2] :]), rotate(k, at), v)


def test_within_a_chunk_it_is_rotary_attention():
    q, k, v = draw(tokens=20)
    assert torch.allclose(dual_chunk(q, k, v, rotate, chunk=20, trained=32), plain(q, k, v), atol=1e-5)


def test_within_the_trained_context_of_two_chunks_it_is_too():
    q, k, v = draw(tokens=24)
    found = dual_chunk(q, k, v, rotate, chunk=12, trained=24)
    assert torch.allclose(found, plain(q, k, v), atol=1e-4)


@given(st.integers(1, 30), st.integers(1, 30))
def test_no_relative_position_is_beyond_those_trained(chunk, more):
    trained, at = chunk + more, torch.arange(4 * chunk)
    i, j = at[:, None], at[None]
    own, following, far = (where[:, None] - j % chunk for where in query_positions(at, chunk, trained))
    back = i // chunk - j // chunk
    relative = torch.where(back == 0, own, torch.where(back == 1, following, far))
    seen = j <= i
    assert relative[seen].max() <= trained - 1 and relative[seen].min() >= 0
    near = seen & (i - j <= trained - chunk) & (back <= 1)
    assert torch.equal(relative[near], (i - j)[near])


def test_the_published_example():
    at = torch.arange(12)
    relative = torch.stack([where[:, None] - (at % 6)[None] for where in query_positions(at, 6, 10)])
    assert relative[:, :, 0].max() == 9


@given(seed=st.integers(0, 10_000), t=st.integers(0, 48))
def test_nothing_that_comes_later_moves_a_bit_of_dual_chunks(seed, t):
    q, k, v = draw(seed)
    before = dual_chunk(q, k, v, rotate, 16, 24)[:, :, : t + 1]
    assert torch.equal(before, dual_chunk(*after(t, q, k, v), rotate, 16, 24)[:, :, : t + 1])


def test_parts_put_together_are_one_softmax():
    q, k, v = draw(tokens=30)
    at = torch.arange(30)
    seen = causal(at, 30)
    thirds = [seen & (at[None] // 10 == third) for third in range(3)]
    found = merged([part(q, k, v, mask, 0.25) for mask in thirds]).flatten(1, 2)
    assert torch.allclose(found, attend(q, k, v, seen, 0.25), atol=1e-5)


def test_a_decoding_step_is_the_forwards_last_row():
    q, k, v = draw(tokens=40)
    whole = dual_chunk(q, k, v, rotate, 16, 24)
    assert torch.allclose(dual_chunk(q[:, :, -1:], k, v, rotate, 16, 24), whole[:, :, -1:], atol=1e-5)


def test_chunks_are_shorter_than_the_trained_context():
    with refused(UserError, None, "16 tokens", "0 < chunk < trained"):
        dual_chunk(*draw(), rotate, chunk=16, trained=16)
