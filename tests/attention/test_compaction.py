"""Closing gaps: what indexing gives, in place or not, and attention that reads the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from attention.drawing import rotate
from kvlab.attention import compaction
from kvlab.attention.compaction import compact, new_places
from kvlab.core.errors import LayoutMismatch
from refusals import refused


def caches(*shape: int, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(*shape).to(dtype), torch.randn(*shape).to(dtype)


DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


@settings(deadline=None, max_examples=60)
@given(
    mask=st.lists(st.booleans(), max_size=40),
    step=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_a_mask_keeps_what_indexing_keeps(mask, step, dtype):
    keep = torch.tensor(mask, dtype=torch.bool)
    k, v = caches(2, len(mask), 3, dtype=dtype)
    wanted = k[:, keep], v[:, keep]
    found = compact(k, v, keep)
    assert torch.equal(found.k, wanted[0]) and torch.equal(found.v, wanted[1])
    assert found.positions.tolist() == [i for i, kept in enumerate(mask) if kept]
    assert found.freed == k.nbytes + v.nbytes - found.k.nbytes - found.v.nbytes
    old, compaction.STEP = compaction.STEP, step
    try:
        there = compact(k, v, keep, in_place=True)
    finally:
        compaction.STEP = old
    assert torch.equal(there.k, wanted[0]) and torch.equal(there.v, wanted[1])
    assert there.k.numel() == 0 or there.k.data_ptr() == k.data_ptr()


def test_rows_and_heads_may_keep_their_own_tokens():
    k, v = caches(2, 3, 10, 4)
    rows = torch.tensor([[0, 3, 9], [1, 2, 4]])
    found = compact(k, v, rows)
    for row in range(2):
        assert torch.equal(found.k[row], k[row, :, rows[row]])
    heads = torch.stack([torch.stack([torch.randperm(10)[:5].sort().values for _ in range(3)]) for _ in range(2)])
    found = compact(k, v, heads)
    for row in range(2):
        for head in range(3):
            assert torch.equal(found.v[row, head], v[row, head, heads[row, head]])
    by_head = torch.tensor([[0, 1], [2, 3], [4, 5]])
    assert torch.equal(compact(k[0], v[0], by_head).k[2], k[0, 2, 4:6])


def test_attention_over_what_is_left_is_masked_attention_over_all():
    k, v = caches(1, 2, 30, 8)
    q = torch.randn(1, 2, 4, 8)
    keep = torch.rand(30) < 0.5
    left = compact(k, v, keep)
    wanted = functional.scaled_dot_product_attention(q, k, v, attn_mask=keep.expand(4, 30))
    assert torch.allclose(functional.scaled_dot_product_attention(q, left.k, left.v), wanted, atol=1e-6)


def test_keys_that_are_turned_where_they_stood_read_the_same():
    """A kept token's rotary angle is that of its own position, not of its place among those that stayed."""
    k, v = caches(1, 2, 30, 8)
    q, keep = torch.randn(1, 2, 1, 8), torch.arange(30) % 3 != 1
    left, everywhere = compact(k, v, keep), torch.arange(30)
    turned = rotate(q, torch.tensor([30]))
    wanted = functional.scaled_dot_product_attention(turned, rotate(k, everywhere), v, attn_mask=keep[None])
    at_home = functional.scaled_dot_product_attention(turned, rotate(left.k, left.positions), left.v)
    renumbered = functional.scaled_dot_product_attention(
        turned, rotate(left.k, everywhere[: len(left.positions)]), left.v
    )
    assert torch.allclose(at_home, wanted, atol=1e-6)
    assert not torch.allclose(renumbered, wanted, atol=1e-3)


def test_all_kept_is_the_same_and_none_is_empty():
    k, v = caches(2, 10, 4)
    everything, nothing = (
        compact(k, v, torch.ones(10, dtype=torch.bool)),
        compact(k, v, torch.zeros(10, dtype=torch.bool)),
    )
    assert torch.equal(everything.k, k) and torch.equal(everything.v, v) and everything.freed == 0
    assert nothing.k.shape == (2, 0, 4) and nothing.freed == k.nbytes + v.nbytes


def test_places_undo_positions():
    positions = torch.tensor([1, 4, 5])
    places = new_places(7, positions)
    assert places.tolist() == [-1, 0, -1, -1, 1, 2, -1]
    assert torch.equal(places[positions], torch.arange(3))


@pytest.mark.parametrize(
    ("keep", "code", "data"),
    [
        (torch.tensor([2, 1]), "layout.order", ()),
        (torch.tensor([1, 1]), "layout.order", ()),
        (torch.tensor([0, 10]), None, ("from 0 to 10", "10 tokens")),
        (torch.tensor([-1, 3]), None, ("from -1",)),
        (torch.tensor([1.0]), None, ("int64", "torch.float32 of [1]")),
        (torch.ones(9, dtype=torch.bool), None, ("bool [10]", "[9]")),
        (torch.zeros(3, 2, dtype=torch.int64), None, ("[3, 2]", "[2, 10, 4]")),
    ],
)
def test_what_cannot_be_kept_is_refused(keep, code, data):
    k, v = caches(2, 10, 4)
    with refused(LayoutMismatch, code, *data):
        compact(k, v, keep)


def test_k_and_v_are_of_one_shape():
    with refused(LayoutMismatch, None, "[2, 3, 4]", "[2, 3, 5]"):
        compact(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), torch.tensor([0]))
