"""The scorer: its published facts, one key for the same bits wherever they lie, and no key of another request."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

from kvlab.core.errors import LayoutMismatch, NonFinite
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import Geometry, same_bits
from kvlab.kvstore.paging.ledger import ChunkEntry, Ledger
from kvlab.kvstore.paging.scorer import MEAN, MISSING, SIGNS, Rebuilt, Scorer, pairwise_sum
from kvlab.kvstore.snapshot.chain import links
from kvstore.paging import chunk_of, filled, numbers, random_bits
from refusals import refused
from tiers import examples

E0, E1, E2 = torch.eye(4)[:3]
CHAIN = tuple(f"chunk {number}".encode() for number in range(6))


def payload(geometry: Geometry, *directions: torch.Tensor, head: int | None = None) -> torch.Tensor:
    """A chunk whose K rows all point one way, given by layer; V is NaN, which is none of the scorer's business."""
    chunk = torch.full(geometry.chunk_shape, torch.nan, dtype=geometry.torch_dtype)
    chunk[:, 0] = 0
    heads = slice(None) if head is None else head
    for layer in range(geometry.layers):
        chunk[layer, 0, heads] = directions[layer % len(directions)].to(chunk.dtype)
    return chunk


def queries(geometry: Geometry, *directions: torch.Tensor, group: int = 2, head: int | None = None) -> torch.Tensor:
    """One direction a layer, in all query heads or in one."""
    asked = torch.zeros(geometry.layers, group * geometry.kv_heads, geometry.head_dim)
    for layer in range(geometry.layers):
        asked[layer, slice(None) if head is None else head] = directions[layer % len(directions)]
    return asked


def score(geometry: Geometry, chunk: torch.Tensor, asked: torch.Tensor) -> float:
    scorer = Scorer(geometry)
    assert scorer.add(b"only", chunk)
    return scorer.scores(asked, [b"only"])[0]


# The published facts


def test_orthogonal_is_0_and_aligned_is_1(geometry):
    assert score(geometry, payload(geometry, E0), queries(geometry, E1)) == 0
    assert score(geometry, payload(geometry, E0), queries(geometry, E0)) == 1
    assert score(geometry, payload(geometry, E0), queries(geometry, -E0)) == -1


def test_one_of_two_layers_is_a_half(geometry):
    assert score(geometry, payload(geometry, E0, E1), queries(geometry, E0)) == 0.5


def test_one_query_head_of_a_group_is_enough(geometry):
    asked = queries(geometry, E1)
    asked[:, 3] = E0
    assert score(geometry, payload(geometry, E0), asked) == 1


def test_each_query_head_meets_its_own_kv_head(geometry):
    chunk = payload(geometry, E0, head=1)  # of KV head 0, every key is 0
    assert [score(geometry, chunk, queries(geometry, E0, head=head)) for head in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("factor", [1e-3, 0.3, 7.0, 1e5])
def test_the_length_of_a_query_says_nothing(geometry, factor):
    chunk, asked = numbers(geometry, 4), torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(3))
    assert score(geometry, chunk, factor * asked) == pytest.approx(score(geometry, chunk, asked), abs=2e-7)


def test_a_mixed_chunk_points_between(geometry):
    chunk = payload(geometry, E0)
    chunk[:, 0, :, 2:] = E1
    assert score(geometry, chunk, queries(geometry, E0)) == pytest.approx(1 / math.sqrt(2), abs=1e-7)


def test_equal_chunks_score_equal(geometry):
    scorer, chunk = Scorer(geometry), numbers(geometry, 4)
    for identity in CHAIN:
        scorer.add(identity, chunk)
    assert len(set(scorer.scores(queries(geometry, E0 + E1), CHAIN))) == 1


def test_no_seed_and_a_sentinel_are_missing(geometry):
    scorer = Scorer(geometry)
    assert scorer.rebuild(CHAIN, []) == Rebuilt(0, 0, 6)
    assert scorer.scores(queries(geometry, E0), CHAIN) == [-2.0] * 6
    nothing = Ledger(tuple(ChunkEntry(True, None, 0) for _ in CHAIN), 0)  # a published -inf is a score of None
    assert scorer.rebuild(CHAIN, [], nothing) == Rebuilt(0, 0, 6)
    assert scorer.scores(queries(geometry, E0), CHAIN) == [MISSING] * 6


def test_a_ledger_of_three_seeds_three_of_six(geometry):
    scorer = Scorer(geometry)
    ledger = Ledger(tuple(ChunkEntry(True, score, 0) for score in (0.5, -0.25, 0.75)), 0)
    assert scorer.rebuild(CHAIN, [], ledger) == Rebuilt(0, 3, 3)
    assert scorer.scores(queries(geometry, E0), CHAIN) == [0.5, -0.25, 0.75, -2.0, -2.0, -2.0]


def test_a_chunk_without_keys_outranks_none(geometry):
    scorer = Scorer(geometry)
    scorer.add(CHAIN[0], payload(geometry, -E0))
    scores = scorer.scores(queries(geometry, E0), CHAIN[:2])
    assert scores == [-1.0, MISSING] and scores[0] > scores[1]


# What a key is


def test_the_mean_key_is_the_normalised_sum(geometry):
    scorer, chunk = Scorer(geometry), numbers(geometry, 4)
    scorer.add(b"", chunk)
    naive = normalize(chunk[:, 0].sum(-2), dim=-1, eps=1e-6)
    assert torch.allclose(scorer.keys[b""][:, :, 0], naive, rtol=0, atol=2e-7)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("summary", [MEAN, SIGNS])
def test_a_key_that_is_not_finite_drops_the_chunk(geometry, value, summary):
    scorer, chunk = Scorer(geometry, summary), numbers(geometry, 4)
    assert scorer.add(CHAIN[0], chunk)
    chunk[1, 0, 1, 2, 3] = value
    assert not scorer.add(CHAIN[0], chunk)  # the older keys are gone with it
    assert scorer.scores(queries(geometry, E0), CHAIN[:1]) == [MISSING]


def test_keys_of_any_size_have_a_direction(geometry):
    for size in (1e-5, 1e30, 3e38):
        assert score(geometry, size * payload(geometry, E0), queries(geometry, E0)) == 1
    assert score(geometry, 1e-9 * payload(geometry, E0), queries(geometry, E0)) < 0.01  # below eps there is none
    assert score(geometry, 0 * payload(geometry, E0), queries(geometry, E0)) == 0


def test_signs_see_one_key_that_the_mean_does_not(geometry):
    needle = torch.tensor([1.0, -1.0, 1.0, 1.0])
    chunk = payload(geometry, -needle)
    chunk[:, 0, :, 1] = needle
    asked = queries(geometry, needle)
    assert score(geometry, chunk, asked) == -1
    scorer = Scorer(geometry, SIGNS)
    scorer.add(b"", chunk)
    assert scorer.scores(asked, [b""]) == [1.0]
    assert scorer.keys[b""].shape == (2, 2, 4, 1) and scorer.keys[b""].dtype == torch.uint8  # a bit for each number


def test_signs_agree_with_the_plain_definition():
    geometry = Geometry(layers=3, kv_heads=2, head_dim=10, dtype="bfloat16", chunk_tokens=4)
    chunk, asked = numbers(geometry, 4), torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(5))
    scorer = Scorer(geometry, SIGNS)
    scorer.add(b"", chunk)
    signs = torch.where(chunk[:, 0] < 0, -1.0, 1.0).repeat_interleave(3, dim=1) / math.sqrt(10)
    dots = torch.einsum("lhd,lhnd->lhn", normalize(asked, dim=-1), signs)
    assert scorer.scores(asked, [b""])[0] == pytest.approx(dots.flatten(1).amax(-1).mean().item(), abs=1e-6)


# The same bits make the same key


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("summary", [MEAN, SIGNS])
def test_a_key_from_the_pool_is_the_key_from_bytes(dtype, summary):
    geometry = Geometry(layers=3, kv_heads=2, head_dim=24, dtype=dtype, chunk_tokens=64)
    pager = filled(numbers(geometry, 8 * 64), geometry, PagerConfig(pool_tokens=512), step=64)
    device, host = Scorer(geometry, summary), Scorer(geometry, summary)
    for chunk in range(8):
        identity = str(chunk).encode()
        device.add(identity, pager.chunks.pool.data[pager.chunks[chunk].block])
        raw = bytearray(pager.payload(chunk).view(torch.uint8).numpy().tobytes())
        host.add(identity, torch.frombuffer(raw, dtype=geometry.torch_dtype).view(geometry.chunk_shape))
    assert all(same_bits(device.keys[identity], host.keys[identity]) for identity in device.keys)
    asked = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(1))
    assert device.scores(asked, list(device.keys)) == host.scores(asked, list(host.keys))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (3, 0, 4, 1, 2), (1, 4, 0, 2, 3)])
def test_a_key_does_not_depend_on_strides(order):
    geometry = Geometry(layers=2, kv_heads=3, head_dim=20, dtype="float32", chunk_tokens=48)
    chunk = numbers(geometry, 48)
    chunk[..., 24:, :] += 1e20  # the rows cancel, and what is left of the sum is what its order made of it
    chunk[..., :24, :] -= chunk[..., torch.randperm(24, generator=torch.Generator().manual_seed(0)) + 24, :]
    laid = chunk.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist())
    a, b = Scorer(geometry), Scorer(geometry)
    a.add(b"", chunk)
    b.add(b"", laid)
    assert same_bits(a.keys[b""], b.keys[b""])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("summary", [MEAN, SIGNS])
def test_a_key_from_another_device_is_the_same(summary):
    geometry = Geometry(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16")
    a, b = Scorer(geometry, summary), Scorer(geometry, summary)
    chunk = numbers(geometry, 64)
    a.add(b"", chunk)
    b.add(b"", chunk.cuda())
    assert same_bits(a.keys[b""], b.keys[b""])


def test_a_score_does_not_depend_on_which_other_chunks_there_are(geometry, monkeypatch):
    scorer = Scorer(geometry)
    for chunk, identity in enumerate(CHAIN):
        scorer.add(identity, numbers(geometry, 4, seed=chunk))
    asked = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(9))
    together = scorer.scores(asked, CHAIN)
    assert [scorer.scores(asked, [identity])[0] for identity in CHAIN] == together
    monkeypatch.setattr("kvlab.kvstore.paging.scorer.AT_ONCE", 1)
    assert scorer.scores(asked, CHAIN) == together


@examples(60)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40))
def test_a_pairwise_sum_is_a_sum(values):
    x = torch.tensor(values, dtype=torch.float64)
    assert pairwise_sum(x, -1).item() == pytest.approx(math.fsum(values), rel=1e-12, abs=1e-9)
    assert same_bits(pairwise_sum(x[:, None].expand(-1, 3), -2), pairwise_sum(x, -1).expand(3))


# Requests and snapshots


def test_a_rebuilt_scorer_has_bit_equal_keys(geometry):
    rows = numbers(geometry, 24)
    chunks = [chunk_of(rows, chunk, geometry) for chunk in range(6)]
    live, other = Scorer(geometry), Scorer(geometry)
    for identity, chunk in zip(CHAIN, chunks, strict=True):
        live.add(identity, chunk)
    ledger = Ledger(tuple(ChunkEntry(True, 0.123, 0) for _ in CHAIN), 0)
    assert other.rebuild(CHAIN, iter(chunks), ledger) == Rebuilt(6, 0, 0)
    assert all(same_bits(live.keys[identity], other.keys[identity]) for identity in CHAIN)
    asked = queries(geometry, E0 + E2)
    assert live.scores(asked, CHAIN) == other.scores(asked, CHAIN) and 0.123 not in other.scores(asked, CHAIN)


def test_seeds_stand_in_only_where_keys_are_missing(geometry):
    chunks = [payload(geometry, E0), None, payload(geometry, torch.nan * E0), payload(geometry, E1)]
    ledger = Ledger(tuple(ChunkEntry(True, score, 0) for score in (0.1, 0.2, 0.3, 0.4)), 0)
    scorer = Scorer(geometry)
    assert scorer.rebuild(CHAIN, chunks, ledger) == Rebuilt(from_keys=2, from_seed=2, missing=2)
    assert scorer.scores(queries(geometry, E0), CHAIN) == [1.0, 0.2, 0.3, 0.0, -2.0, -2.0]
    scorer.add(CHAIN[1], payload(geometry, E0))  # keys that are found later take the seed's place
    assert scorer.scores(queries(geometry, E0), CHAIN)[1] == 1.0 and CHAIN[1] not in scorer.seeds


def test_no_key_of_another_request_is_met(geometry):
    """Two requests of equal length, one after the other: the second one's chunks have no keys yet."""
    first, second = links(list(range(24)), 4), links([*range(8), *range(100, 116)], 4)
    scorer = Scorer(geometry)
    for identity in first:
        scorer.add(identity, payload(geometry, E0))
    asked = queries(geometry, E0)
    assert scorer.scores(asked, first) == [1.0] * 6
    assert scorer.scores(asked, second) == [1.0, 1.0] + [MISSING] * 4  # they share their first two chunks
    scorer.add(second[2], payload(geometry, E1))
    assert scorer.scores(asked, second)[2] == 0.0 and scorer.scores(asked, first)[2] == 1.0
    scorer.keep(second)
    assert scorer.scores(asked, first) == [1.0, 1.0] + [MISSING] * 4


def test_the_index_of_a_chunk_would_have_met_a_stale_key(geometry):
    """The negative control: filed under its index and skipped if present, the first request's key answers."""
    by_index: dict[int, torch.Tensor] = {}
    for keys in (payload(geometry, E0), payload(geometry, E1)):
        by_index.setdefault(0, keys)
    assert score(geometry, by_index[0], queries(geometry, E1)) == 0
    scorer = Scorer(geometry)
    for identity, keys in ((b"first", payload(geometry, E0)), (b"second", payload(geometry, E1))):
        scorer.add(identity, keys)
    assert scorer.scores(queries(geometry, E1), [b"second"]) == [1.0]


def test_keys_of_the_same_tokens_are_taken_anew(geometry):
    scorer = Scorer(geometry)
    scorer.add(CHAIN[0], payload(geometry, E0))
    scorer.add(CHAIN[0], payload(geometry, E1))  # the same prompt, decoded from another codec
    assert scorer.scores(queries(geometry, E1), CHAIN[:1]) == [1.0]


def test_a_rebuild_forgets_what_was_there(geometry):
    scorer = Scorer(geometry)
    ledger = Ledger((ChunkEntry(True, 0.5, 0),), 0)
    scorer.rebuild(CHAIN, [None, payload(geometry, E0)], ledger)
    assert scorer.rebuild(CHAIN, [payload(geometry, E1)]) == Rebuilt(1, 0, 5)
    with refused(LayoutMismatch, "layout.payload-count", 6):
        scorer.rebuild(CHAIN, [payload(geometry, E0)] * 7)
    assert scorer.scores(queries(geometry, E0), CHAIN) == [MISSING] * 6


# Refusals


@pytest.mark.parametrize("shape", [(2, 4), (3, 4, 4), (2, 4, 5), (2, 3, 4), (2, 0, 4)])
def test_queries_of_another_model_are_refused(geometry, shape):
    with refused(LayoutMismatch, "layout.queries", "multiple of 2", list(shape)):
        Scorer(geometry).scores(torch.zeros(shape), CHAIN)


def test_queries_are_finite(geometry):
    with refused(NonFinite, "non-finite.query"):
        Scorer(geometry).scores(torch.full((2, 2, 4), torch.inf), CHAIN)


def test_chunks_of_another_model_are_refused(geometry):
    scorer = Scorer(geometry)
    for wrong in (numbers(geometry, 3), numbers(replace(geometry, dtype="float16"), 4)):
        with refused(LayoutMismatch, "layout.chunk", list(wrong.shape), str(wrong.dtype).removeprefix("torch.")):
            scorer.add(b"", wrong)


def test_any_bits_have_a_finite_score_or_none(geometry):
    geometry = replace(geometry, dtype="float16")
    scorer = Scorer(geometry)
    for seed in range(50):
        scorer.add(str(seed).encode(), random_bits(geometry, 4, seed))
    scores = scorer.scores(queries(geometry, E0), [str(seed).encode() for seed in range(50)])
    assert all(score == MISSING or -1 - 1e-6 <= score <= 1 + 1e-6 for score in scores)
