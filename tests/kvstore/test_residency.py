"""The policies: one contract for all of them, and what each one keeps."""

from __future__ import annotations

import pytest
import torch

from kvlab.core.errors import CapabilityError, UnknownName
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.paging.ledger import ChunkEntry
from kvlab.kvstore.paging.pager import Pager
from kvlab.kvstore.paging.residency import MAKERS, AttentionSeen, build, staying, worst_first
from kvstore.paging import append, chunk_of, filled, numbers, saved
from refusals import refused

ENTRIES = [ChunkEntry(True, score, used) for score, used in ((0.5, 9), (None, 1), (-1.0, 4), (0.5, 2), (0.1, 7))]
CHAIN = tuple(bytes([number]) for number in range(20))


@pytest.mark.parametrize("name", MAKERS)
def test_a_policy_is_a_function_of_the_ledger(geometry, name):
    first, again = build(name, geometry, seed=3), build(name, geometry, seed=3)
    order = worst_first(first, enumerate(ENTRIES))
    assert order == worst_first(again, reversed(list(enumerate(ENTRIES)))) and sorted(order) == list(range(5))
    assert first.name == name


@pytest.mark.parametrize(
    "name, order",
    [("lru", [1, 3, 2, 4, 0]), ("qk", [2, 4, 0, 3, 1]), ("oracle", [2, 4, 0, 3, 1]), ("sign_bit", [2, 4, 0, 3, 1])],
)
def test_the_order_in_which_they_go(geometry, name, order):
    assert worst_first(build(name, geometry), enumerate(ENTRIES)) == order


@pytest.mark.parametrize("name", ["lru", "qk", "oracle", "sign_bit"])
def test_of_equals_the_first_one_goes(geometry, name):
    assert worst_first(build(name, geometry), [(chunk, ChunkEntry(True, 0.5, 3)) for chunk in (4, 2, 7)]) == [2, 4, 7]


def test_an_unknown_policy_is_refused(geometry):
    with refused(UnknownName, None, "orakel", "oracle"):
        build("orakel", geometry)


def test_random_is_uniform_and_stable(geometry, config):
    kept = [0] * 40
    for seed in range(100):
        pager = Pager(geometry, PagerConfig(48, 4, 1, 0), build("random", geometry, seed))
        pager.alloc_span(0, 4)
        rows = numbers(geometry, 160)
        for _ in range(39):
            append(pager, rows, 4)
        assert len(pager.reselect()) == 0  # the highest numbers are those that were kept all along
        for chunk in pager.resident:
            kept[chunk] += 1
    assert kept[0] == kept[39] == 100
    # 10 of the 38 others each time: 26 expected, standard deviation 4.4
    assert all(26 - 4 * 4.4 < count < 26 + 4 * 4.4 for count in kept[1:39])


def test_random_depends_on_its_seed(geometry):
    orders = {tuple(worst_first(build("random", geometry, seed), enumerate(ENTRIES))) for seed in range(20)}
    assert len(orders) > 10


def test_oracle_needs_mass_and_qk_queries(geometry):
    assert build("oracle", geometry).scores(AttentionSeen(mass=(0.25, 0.75))) == [0.25, 0.75]
    for name, missing in (("oracle", "mass"), ("qk", "queries"), ("sign_bit", "queries")):
        with refused(CapabilityError, "capability.policy-input", name, missing):
            build(name, geometry).scores(AttentionSeen(chain=CHAIN))
    for name in ("lru", "random"):
        assert build(name, geometry).scores(AttentionSeen()) is None


@pytest.mark.parametrize("name", ["qk", "sign_bit", "oracle"])
@pytest.mark.parametrize("depth", [2, 9, 13])
def test_a_needle_comes_back(name, depth):
    """One chunk holds what the queries look for; it was evicted long ago."""
    geometry = Geometry(layers=2, kv_heads=1, head_dim=16, dtype="float32", chunk_tokens=4)
    config, source = PagerConfig(32, 4), torch.Generator().manual_seed(depth)
    rows = torch.randn(2, 2, 1, 80, 16, generator=source)
    wanted = torch.randn(2, 1, 16, generator=source)
    rows[:, 0, :, depth * 4 : depth * 4 + 4] = wanted[:, :, None]
    pager = filled(rows, geometry, config, name)
    for chunk in range(pager.sealed):
        if name != "oracle":
            pager.policy.scorer.add(CHAIN[chunk], pager.payload(chunk))
    pager.page_in(1)
    mass = [float(chunk == depth) for chunk in range(20)]
    scores = pager.policy.scores(AttentionSeen(queries=wanted.repeat(1, 4, 1), chain=CHAIN, mass=mass))
    assert max(scores) == scores[depth]
    pager.set_scores(scores)
    pager.reselect()
    assert depth in pager.resident and pager.check() == []


def test_every_policy_restores_to_the_same_set_at_an_equal_pool(geometry, config):
    rows = numbers(geometry, 80)
    for name in MAKERS:
        pager = filled(rows, geometry, config, name)
        pager.set_scores([float(chunk % 6) for chunk in range(20)])
        pager.reselect()
        other = Pager.restored(geometry, config, build(name, geometry), *saved(pager))
        assert other.resident == pager.resident and len(other.reselect()) == 0


def test_scores_of_a_restored_scorer_select_the_same_chunks(geometry, config):
    rows, asked = numbers(geometry, 80), torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(2))
    live, warm = build("qk", geometry), build("qk", geometry)
    for chunk in range(20):
        live.scorer.add(CHAIN[chunk], chunk_of(rows, chunk, geometry))
    warm.scorer.rebuild(CHAIN, (chunk_of(rows, chunk, geometry) for chunk in range(20)))
    assert live.scores(AttentionSeen(asked, CHAIN)) == warm.scores(AttentionSeen(asked, CHAIN))


def test_who_stays_after_a_restore():
    config = PagerConfig(pool_tokens=20, chunk_tokens=4, sink_chunks=1, tail_chunks=1)
    everything = [
        ChunkEntry(True, score, used)
        for score, used in ((0.0, 1), (2.0, 2), (2.0, 9), (None, 3), (1.0, 4), (-9.0, 5), (-9.0, 6))
    ]
    assert staying(config, everything) == {0, 2, 3, 5, 6}
    assert staying(config, [ChunkEntry(False, None, 0)] * 7) == {0, 5, 6}
    assert staying(config, []) == set()
