"""Attention over pages, held against torch's own over each whole sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cache.pages import attention
from kvlab.cache.pages import step as layout
from kvlab.cache.pages.attention import Keys, attend, softmax_over
from kvlab.cache.pages.step import ServerStep, batches

KV, GROUP, DIM, BLOCK = 2, 3, 8, 4


@pytest.fixture(autouse=True, scope="module")
def small_spans():
    """Cuts that short sequences meet too."""
    names = {"SPAN": 5, "SCRATCH": 12, "QUERIES": 3, "FEW": 4}
    before = {name: getattr(layout, name) for name in names}
    for name, value in names.items():
        setattr(layout, name, value)
    yield
    for name, value in before.items():
        setattr(layout, name, value)


@st.composite
def steps(draw):
    """Lengths of sequences, and how many of their last tokens the step computes."""
    lengths = draw(st.lists(st.integers(1, 23), min_size=1, max_size=5))
    return lengths, [draw(st.integers(1, length)) for length in lengths]


def laid_out(lengths, news, seed=0):
    """Pages in a shuffled order, the step over them, and each sequence's own keys and values."""
    source = torch.Generator().manual_seed(seed)
    blocks = [-(-length // BLOCK) for length in lengths]
    places = torch.randperm(sum(blocks) + 2, generator=source)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    k, v = (torch.randn(KV, len(places) * BLOCK, DIM, generator=source) for _ in "kv")
    at = 0
    for row, count in enumerate(blocks):
        table[row, :count], at = places[at : at + count], at + count
    starts = [0, *torch.tensor(news).cumsum(0).tolist()]
    step = ServerStep.of(starts, lengths, table, BLOCK)
    return step, k, v, table


@given(steps(), st.integers(0, 5))
def test_it_is_attention_over_each_sequence(lengths_and_news, seed):
    lengths, news = lengths_and_news
    step, k, v, table = laid_out(lengths, news, seed)
    q = torch.randn(sum(news), KV * GROUP, DIM, generator=torch.Generator().manual_seed(seed))
    out, log_sum = attend(q, lambda slots, positions: Keys(k[:, slots], v[:, slots]), step, 0.3)
    for row, (length, new) in enumerate(zip(lengths, news, strict=True)):
        place = torch.arange(length)
        slots = table[row, place // BLOCK].long() * BLOCK + place % BLOCK
        own = slice(step.starts[row], step.starts[row + 1])
        seen = torch.arange(length) <= torch.arange(length - new, length)[:, None]
        due = torch.nn.functional.scaled_dot_product_attention(
            q[own].transpose(0, 1), k[:, slots], v[:, slots], attn_mask=seen, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[own], due.transpose(0, 1), atol=1e-5, rtol=1e-5)
        scores = torch.einsum("qhd,hkd->qhk", q[own] * 0.3, k[:, slots].repeat_interleave(GROUP, 0))
        sums = scores.masked_fill(~seen[:, None], -torch.inf).logsumexp(-1)
        torch.testing.assert_close(log_sum[own], sums, atol=1e-5, rtol=1e-5)
        assert torch.equal(step.own_slots()[own], slots[length - new :])
        assert torch.equal(step.positions[own], place[length - new :])


def test_where_torchs_kernel_shares_no_heads_the_answer_is_the_same(monkeypatch):
    q, k, v = torch.randn(2, KV * GROUP, 5, DIM), *torch.randn(2, 2, KV, 7, DIM)
    mask = layout.Mask.of(torch.arange(7) <= torch.arange(5)[:, None])
    found = softmax_over(q, k, v, mask, 0.3)
    monkeypatch.setattr(attention, "SHARING", (99, 0))
    for one, other in zip(found, softmax_over(q, k, v, mask, 0.3), strict=True):
        assert torch.equal(one, other)


@given(steps(), st.integers(0, 5))
def test_an_answer_does_not_depend_on_who_else_is_served(lengths_and_news, seed):
    lengths, news = lengths_and_news
    step, k, v, table = laid_out(lengths, news, seed)
    q = torch.randn(sum(news), KV * GROUP, DIM, generator=torch.Generator().manual_seed(seed))
    read = lambda slots, positions: Keys(k[:, slots], v[:, slots])  # noqa: E731
    together = attend(q, read, step, 1.0)
    for row, (length, new) in enumerate(zip(lengths, news, strict=True)):
        own = slice(step.starts[row], step.starts[row + 1])
        alone = attend(q[own], read, ServerStep.of([0, new], [length], table[row : row + 1], BLOCK), 1.0)
        assert torch.equal(together.mean[own], alone.mean) and torch.equal(together.log_sum[own], alone.log_sum)


@given(steps())
def test_what_is_decoded_at_once_is_bounded(lengths_and_news):
    lengths, news = lengths_and_news
    step, *_ = laid_out(lengths, news)
    found = list(batches(step, few=True))
    spans = [span for batch in found for span in batch]
    assert all(sum(span.last - span.first for span in batch) <= layout.SCRATCH for batch in found)
    for row, length in enumerate(lengths):
        own = [(span.first, span.last) for span in spans if span.row == row]
        assert [first for first, _ in own] == [0, *[last for _, last in own[:-1]]] and own[-1][1] == length
