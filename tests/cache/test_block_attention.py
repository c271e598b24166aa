"""Attention that reads a coded cache block by block: what it sees, and how much it holds.

`test_columns.py` runs these again with compiled loops, in a process of its own.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from cache.test_ends import ended
from cache.test_hf_cache import BATCH, IDS, PER_TOKEN, WAYS, fitted, generated, hadamard, kivi, positions  # noqa: F401
from kvlab.cache.hf import attention as hf_attention
from kvlab.cache.hf import kv_cache as hf_cache
from kvlab.cache.hf.attention_view import Stored
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.codecs.int import IntStream
from kvlab.codecs.klt import KltStream
from kvlab.core.recipe import Recipe

LAYERS, HEADS, HEAD_DIM = 3, 2, 32
KLT = KltStream(bits=3, block_size=16, sink=2, recent=3)
RECIPES = PER_TOKEN | {"kivi": kivi(2), "ends": ended("before"), "klt with ends": Recipe(k=KLT, v=KLT)}
WINDOWS = {"none": 0, "part": 30_000, "all": None}
SOONER = [("serving", "part"), ("in_forward", "none")]  # the other pairs at night
WAYS_TO_READ = [
    pytest.param(*way, marks=pytest.mark.full if way in SOONER else pytest.mark.nightly)
    for way in product(("serving", "in_forward"), WINDOWS)
]


@pytest.fixture
def attended(monkeypatch):
    """The calls that were read block by block."""
    calls, attend = [], Stored.attend

    def noted(key, query, *given):
        out = attend(key, query, *given)
        calls.extend([] if out is None else [query.shape[2]])
        return out

    monkeypatch.setattr(Stored, "attend", noted)
    return calls


@torch.inference_mode()
def told(model, cache, cuts):
    """Logits of a batch whose first row is padded, a number of tokens at a time."""
    mask, found, first = BATCH["attention_mask"], [], 0
    for count in cuts:
        last = first + count
        inputs = {"attention_mask": mask[:, :last], "position_ids": positions(mask)[:, first:last]}
        found.append(model(BATCH["input_ids"][:, first:last], past_key_values=cache, **inputs).logits)
        first = last
    logits = torch.cat(found, dim=1)
    return torch.cat((logits[0, 9:], logits[1]))


@pytest.mark.parametrize(("semantics", "window"), WAYS_TO_READ)
@pytest.mark.parametrize("name", RECIPES)
def test_block_by_block_is_what_whole_tensors_give(model, fitted, monkeypatch, attended, name, semantics, window):  # noqa: F811
    caches = [KVCache(model, RECIPES[name], fitted, semantics, window_bytes=WINDOWS[window]) for _ in range(2)]
    cuts = [20, 1, 1, 1, 5, 1, 11]
    found = told(model, caches[0], cuts)
    assert attended.count(1) == 4 * LAYERS and attended.count(5) == attended.count(11) == LAYERS
    monkeypatch.setattr(hf_cache, "passes_here", lambda _: False)
    due = told(model, caches[1], cuts)
    torch.testing.assert_close(found, due, atol=5e-4, rtol=1e-4)
    assert caches[0].coding() == caches[1].coding()
    caches[0].check()


@pytest.mark.full
@pytest.mark.parametrize("way", ["greedy", "beams", "left padding", "beams with padding", "prompt lookup"])
def test_nearly_lossless_codes_generate_the_same(model, attended, way):
    fine, options = Recipe(k=IntStream(bits=8, group=2), v=IntStream(bits=8, group=2)), dict(WAYS[way])
    ids = options.pop("ids", IDS)
    due = generated(model, DynamicCache(), ids, **options)
    for window in WINDOWS.values():
        cache = KVCache(model, fine, semantics="in_forward", window_bytes=window)
        assert torch.equal(generated(model, cache, ids, **options), due)
    assert len(attended) > 3 * LAYERS


def test_what_is_stored_is_never_whole_in_a_step(model, fitted, monkeypatch):  # noqa: F811
    cache = KVCache(model, PER_TOKEN["klt"], fitted)
    told(model, cache, [20])
    monkeypatch.setattr(Stored, "whole", lambda _: pytest.fail("a layer was decoded at once"))
    with torch.inference_mode():
        model(torch.tensor([[5], [6]]), past_key_values=cache)


def test_a_model_whose_attention_was_not_seen_is_given_tensors(model, monkeypatch, attended):
    monkeypatch.setattr(hf_attention, "_SEEN", set())
    cache = KVCache(model, hadamard(), semantics="in_forward")
    told(model, cache, [20])
    assert attended == []
    monkeypatch.setattr(model.config, "_attn_implementation", "eager")
    told(model, cache, [1])
    assert attended == []


def test_whoever_takes_it_for_a_tensor_gets_one(model):
    cache = KVCache(model, hadamard())
    told(model, cache, [20])
    layer = cache.layers[1]
    like = torch.zeros(2, HEADS, 0, HEAD_DIM)
    seen = layer._seen("v", like, hf_cache.Call([0, 0], [None, None]))
    whole = seen.whole()
    assert (seen.shape, seen.dtype, seen.device) == (whole.shape, whole.dtype, whole.device)
    assert torch.equal(seen[:, 0], whole[:, 0]) and torch.equal(seen.mT, whole.mT)
    assert torch.equal(torch.cat([seen, seen], dim=2), torch.cat([whole, whole], dim=2))


def test_a_mask_of_ones_own_is_kept_to(model, attended):
    """Here one that hides half of the tokens from one query."""
    mask = torch.ones(2, 1, 1, 21, dtype=torch.bool)
    mask[:, :, :, 5:14] = False
    found = []
    for passes in (True, False):
        cache = KVCache(model, hadamard(4))
        told(model, cache, [20])
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            if not passes:
                patch.setattr(hf_cache, "passes_here", lambda _: False)
            found.append(model(BATCH["input_ids"][:, :1], past_key_values=cache, attention_mask=mask).logits)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert attended == [1] * LAYERS


# --- the window ----------------------------------------------------------------------------------------------------


def held(cache):
    """Bytes of all tensors that hold codes or decoded columns."""
    rows = [row for layer in cache.layers for stream in "kv" for row in layer.rows[stream]]
    coded = {id(a): a for row in rows for block in row.blocks for part in block.encoded.blocks for a in part}
    coded |= {id(a): a for row in rows for a in (row.loose, row.head, row.tail) if a is not None}
    windows = [window._held for layer in cache.layers for window in layer.windows.values() if window._held is not None]
    size = [sum(a.untyped_storage().nbytes() for a in group) for group in (coded.values(), windows)]
    return size[0] + sum(row.nbytes for row in {id(p): p for p in cache.positions}.values()), size[1]


@pytest.mark.full
@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 400_000), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from(["klt", "hadamard"])
)
def test_no_more_is_held_than_was_stated(model, fitted, window, cuts, name):  # noqa: F811
    cache = KVCache(model, PER_TOKEN[name], fitted, window_bytes=window)
    told(model, cache, cuts)
    cache.batch_repeat_interleave(2)
    with torch.inference_mode():
        model(torch.full((4, 3), 7), past_key_values=cache)
    coded, decoded = held(cache)
    assert (cache.nbytes, cache.working_bytes) == (coded, decoded)
    assert coded + decoded <= 1.3 * sum(entry.coded_bytes for entry in cache.coding()) + 4 * 4 * 48 + window


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_follows_what_generation_does(model, window):
    """Crop, a new order, rows taken twice, a copy, an end: as without one."""
    caches = [KVCache(model, hadamard(2), semantics="in_forward", window_bytes=own) for own in (0, WINDOWS[window])]
    for cache in caches:
        told(model, cache, [20, 1])
        cache.crop(-4)
        cache.reorder_cache(torch.tensor([1, 0]))
    forks = [copy.deepcopy(cache) for cache in caches]
    for group in (caches, forks):
        with torch.inference_mode():
            due, found = (model(torch.tensor([[5, 7], [9, 8]]), past_key_values=cache).logits for cache in group)
        torch.testing.assert_close(found, due, atol=1e-4, rtol=1e-4)
        for layer in range(LAYERS):
            for a, b in zip(group[0].decoded(layer), group[1].decoded(layer), strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    caches[1].reset()
    assert (caches[1].nbytes, caches[1].working_bytes) == (0, 0)


def test_what_stands_before_transformers_attention_says_whose_it_is(model):
    """The witness asks a model which attention it called."""
    KVCache(model, hadamard(4))
    assert hf_attention.ALL_ATTENTION_FUNCTIONS["sdpa"].__name__ == "sdpa_attention_forward"
