"""The pager: bounded, reversible, transactional, and blind to where chunks lie."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kvlab.core.errors import (
    LayoutMismatch,
    NonFinite,
    PagerError,
    ParamsError,
    PinRefused,
    PoolExhausted,
    PoolTooSmall,
    UnknownName,
)
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import Geometry, same_bits
from kvlab.kvstore.paging.ledger import UNKNOWN, ChunkEntry, Ledger
from kvlab.kvstore.paging.pager import Pager
from kvlab.kvstore.paging.residency import build
from kvlab.kvstore.paging.residents import Moves
from kvstore.paging import append, chunk_of, filled, gathers, holds, numbers, random_bits, saved, state, write
from refusals import refused


def new(geometry, config, policy="lru", **settings) -> Pager:
    return Pager(geometry, config, build(policy, geometry), **settings)


# Geometry and sizes


def test_a_chunk_is_all_layers_of_its_tokens():
    geometry = Geometry(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16")
    assert geometry.chunk_shape == (3, 2, 2, 64, 8)
    assert geometry.row_bytes == 3 * 2 * 2 * 8 * 2 and geometry.chunk_bytes == 64 * geometry.row_bytes
    assert [geometry.floor(n) for n in (0, 63, 64, 34077)] == [0, 0, 64, 34048]
    assert [geometry.chunks(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"kv_heads": -1}, {"head_dim": 1.5}, {"chunk_tokens": True}])
def test_sizes_are_whole_numbers(geometry, wrong):
    with refused(ParamsError, None, *(f"{name} is {value}" for name, value in wrong.items())):
        replace(geometry, **wrong)


def test_an_unknown_dtype_is_refused(geometry):
    with refused(UnknownName, None, "flaot16", "float16"):
        replace(geometry, dtype="flaot16")


def test_the_published_floor():
    assert PagerConfig(pool_tokens=448).floor_tokens == 448
    with refused(PoolTooSmall, None, 384, 448):
        PagerConfig(pool_tokens=384)
    with refused(ParamsError, "params.partial-chunk", 450):
        PagerConfig(pool_tokens=450)
    with refused(ParamsError, None, "sink_chunks is -1"):
        PagerConfig(pool_tokens=448, sink_chunks=-1)


def test_geometry_and_config_have_one_chunk_size(geometry):
    with refused(LayoutMismatch, "layout.chunk-size", "4 tokens", 8):
        new(geometry, PagerConfig(pool_tokens=64, chunk_tokens=8))


def test_blocks_are_handed_out_in_the_order_given(geometry, config):
    pager = new(geometry, config, block_order=[7, 3, 0, 1, 2, 4, 5, 6])
    pager.alloc_span(0, 12)
    assert [pager.chunks[chunk].block for chunk in range(3)] == [7, 3, 0]
    with refused(ParamsError, "params.no-permutation", [0] * 8):
        new(geometry, config, block_order=[0] * 8)


# Appending, reading, evicting


@pytest.mark.parametrize("step", [1, 3, 4, 11, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_was_written_is_gathered_bit_for_bit(geometry, config, step, dtype):
    geometry = replace(geometry, dtype=dtype)
    rows = random_bits(geometry, 70)
    pager = filled(rows, geometry, config, step=step)
    assert pager.length == 70 and pager.sealed == 17 and len(pager.resident) == 8
    assert holds(pager, rows) and pager.check() == []


def test_lru_keeps_the_sink_and_a_window(geometry, config):
    pager = filled(numbers(geometry, 80), geometry, config)
    assert pager.resident == (0, 13, 14, 15, 16, 17, 18, 19)


def test_page_out_and_in_are_bit_exact(geometry):
    rows = random_bits(geometry, 40)
    pager = filled(rows, geometry, PagerConfig(pool_tokens=40, chunk_tokens=4))
    before = [pager.payload(chunk) for chunk in range(10)]
    for chunk in (1, 2, 3):
        pager.page_out(chunk)
        assert pager.chunks[chunk].block is None
    pager.chunks.pool.data[pager.chunks.pool.free] = torch.nan  # what a free block holds is nobody's
    assert holds(pager, rows)
    for chunk in (3, 1, 2):
        pager.page_in(chunk)
    assert all(same_bits(pager.payload(chunk), bits) for chunk, bits in enumerate(before))
    assert pager.stats.page_outs == pager.stats.page_ins == 3 and pager.stats.moved_bytes == 6 * geometry.chunk_bytes
    assert holds(pager, rows) and pager.check() == []


def test_a_recalled_chunk_leaves_again_without_a_copy(geometry, config):
    pager = filled(random_bits(geometry, 32), geometry, config)
    pager.page_out(1)
    pager.page_in(1)
    moved, host = pager.stats.moved_bytes, pager.stats.host_bytes
    pager.page_out(1)
    assert (pager.stats.moved_bytes, pager.stats.host_bytes) == (moved, host) == (2 * host, geometry.chunk_bytes)


def test_a_payload_is_a_copy(geometry, config):
    rows = random_bits(geometry, 32)
    pager = filled(rows, geometry, config)
    for chunk in (1, 7):
        pager.payload(chunk).zero_()
        pager.page_out(1)
        pager.payload(1).zero_()
    assert holds(pager, rows)


def test_paging_out_twice_or_in_twice_moves_nothing(geometry, config):
    pager = filled(random_bits(geometry, 32), geometry, config)
    pager.page_out(1)
    before = state(pager)
    pager.page_out(1)
    assert state(pager) == before
    pager.page_in(1)
    epoch, clock = pager.epoch, pager.chunks.clock
    pager.page_in(1)
    assert pager.epoch == epoch and pager.chunks.clock == clock + 1  # it was asked for, and that is all


def test_protected_chunks_do_not_leave(geometry, config):
    pager = filled(numbers(geometry, 30), geometry, config)
    pager.pin(4, 5)
    reasons = [pager.protection(chunk) for chunk in range(8)]
    assert reasons == ["sink", "pin", None, "tail", "tail", "tail", "tail", "filling"]
    for chunk in (0, 1, 3, 7):
        with refused(PagerError, "pager.protected", f"chunk {chunk}", reasons[chunk]):
            pager.page_out(chunk)


@pytest.mark.parametrize("call", [lambda p: p.page_in(5), lambda p: p.page_out(-1), lambda p: p.payload(5)])
def test_an_absent_chunk_is_refused(geometry, config, call):
    with refused(PagerError, "pager.no-such-chunk"):
        call(filled(numbers(geometry, 16), geometry, config))


def test_a_filling_chunk_has_no_payload_and_unwritten_rows_are_nowhere(geometry, config):
    rows = numbers(geometry, 10)
    pager = new(geometry, config)
    pager.chunks.pool.data.fill_(torch.nan)
    pager.alloc_span(0, 10)
    assert pager.gather(0).k.shape == (2, 0, 4)
    write(pager, rows, layers=[0])
    assert gathers(pager, rows, 0) and gathers(pager, rows, 1) and len(pager.gather(1).positions) == 0
    assert pager.sealed == 0
    with refused(PagerError, "pager.not-sealed", "chunk 0"):
        pager.payload(0)
    write(pager, rows)
    assert pager.sealed == 2 and holds(pager, rows)


def test_rows_come_in_order_and_only_where_there_is_a_place(geometry, config):
    pager, rows = new(geometry, config), torch.zeros(2, 3, 4)
    pager.alloc_span(0, 4)
    pager.write(0, 0, rows, rows)
    before = state(pager)
    for layer, start, code, data in (
        (0, 0, "pager.not-next", "not 0"),
        (0, 4, "pager.not-next", "not 4"),
        (0, 3, "pager.no-place", "3 to 6"),
        (2, 0, "pager.no-such-layer", "layer 2"),
        (-1, 0, "pager.no-such-layer", "layer -1"),
    ):
        with refused(PagerError, code, data):
            pager.write(layer, start, rows, rows)
    for wrong in (rows[:1], rows[..., :2], rows.half(), rows[0]):
        with pytest.raises(LayoutMismatch):
            pager.write(1, 0, wrong, rows)
    with refused(LayoutMismatch, "layout.k-and-v", "3 rows"):
        pager.write(1, 0, rows, rows[:, :2])
    assert state(pager) == before


def test_tokens_are_appended(geometry, config):
    pager = filled(numbers(geometry, 6), geometry, config)
    for start in (5, 7):
        with refused(PagerError, "pager.not-next", 6, start):
            pager.alloc_span(start, 1)
    with pytest.raises(ParamsError):
        pager.alloc_span(6, 0)


def test_a_gradient_does_not_enter_the_pool(geometry, config):
    pager, rows = new(geometry, config), torch.zeros(2, 1, 4, requires_grad=True)
    pager.alloc_span(0, 1)
    pager.write(0, 0, rows, rows)
    assert not pager.gather(0).k.requires_grad


def test_an_unknown_order_or_layer_is_refused(geometry, config):
    pager = new(geometry, config)
    with refused(UnknownName, None, "logicl", "logical"):
        pager.gather(0, order="logicl")
    with refused(PagerError, "pager.no-such-layer", "layer 2"):
        pager.gather(2)


# Spans


def test_a_span_is_all_or_nothing(geometry, config):
    pager = filled(numbers(geometry, 41), geometry, config)
    before = state(pager)
    with refused(PoolExhausted, "pool-exhausted.span", 11, 32):
        pager.alloc_span(41, pager.room + 1)
    assert state(pager) == before
    pager.alloc_span(41, pager.room)
    assert pager.check() == []


def test_the_published_room_for_a_span(geometry):
    config = PagerConfig(pool_tokens=64, chunk_tokens=4)
    pager = filled(numbers(geometry, 80), geometry, config, step=4)
    assert pager.room == (16 - 1 - 4) * 4


def test_a_span_keeps_its_own_beginning_until_it_is_written(geometry, config):
    rows = random_bits(geometry, 60)
    pager = filled(rows[:, :, :, :40], geometry, config, step=4)
    pager.alloc_span(40, 12)
    assert pager.protection(10) == "filling" and pager.room == 0
    with pytest.raises(PoolExhausted):
        pager.alloc_span(52, 1)
    write(pager, rows, layers=[0])
    assert pager.room == 0  # one layer is not the forward
    pager.reselect()
    write(pager, rows)
    assert holds(pager, rows) and pager.room > 0


def test_spans_release_one_by_one(geometry):
    rows, config = random_bits(geometry, 60), PagerConfig(pool_tokens=48, chunk_tokens=4)
    pager = filled(rows[:, :, :, :40], geometry, config, step=4)
    pager.alloc_span(40, 8)
    pager.alloc_span(48, 8)
    assert [pager.protection(chunk) for chunk in range(10, 14)] == ["filling"] * 4
    for layer in range(2):
        pager.write(layer, 40, *rows[layer, :, :, 40:48])
    assert [pager.protection(chunk) for chunk in range(10, 14)] == ["tail", "tail", "filling", "filling"]
    write(pager, rows)
    assert holds(pager, rows)


@pytest.mark.parametrize("sinks, tail", [(0, 0), (1, 4), (2, 1), (0, 3)])
@pytest.mark.parametrize("policy", ["lru", "random", "oracle"])
def test_the_smallest_pool_never_deadlocks(geometry, sinks, tail, policy):
    config = PagerConfig((sinks + tail + 2) * 4, 4, sinks, tail)
    rows, pager = random_bits(geometry, 160), new(geometry, config, policy)
    while pager.length < 160:
        assert pager.room >= 1
        append(pager, rows, min(pager.room, 160 - pager.length, 1 + pager.length % 5))
        pager.set_scores([float(chunk * 7 % 5) for chunk in range(pager.sealed)])
        pager.reselect()
        if pager.sealed:
            pager.page_in(pager.length % pager.sealed)
        assert pager.check() == []
    assert holds(pager, rows)


# Pins


def test_a_pin_is_half_open_and_brings_its_chunks_back(geometry):
    config = PagerConfig(pool_tokens=40, chunk_tokens=4)
    pager = filled(random_bits(geometry, 80), geometry, config)
    assert not {4, 5} & set(pager.resident)
    assert pager.pin(16, 24) == Moves(outs=(11, 12), ins=(4, 5))
    assert pager.pins == {4, 5} and {4, 5} <= set(pager.resident)
    more = random_bits(geometry, 120)
    while pager.length < 120:
        append(pager, more, 5)
    assert {4, 5} <= set(pager.resident) and pager.check() == []
    pager.unpin_all()
    pager.page_out(4)
    assert 4 not in pager.resident


@pytest.mark.parametrize("lo, hi", [(8, 8), (9, 3), (0, 0)])
def test_an_empty_or_inverted_range_pins_nothing(geometry, config, lo, hi):
    pager = filled(numbers(geometry, 30), geometry, config)
    assert pager.pin(lo, hi) == Moves() and pager.pins == frozenset()


def test_over_pinning_is_refused_whole(geometry):
    config = PagerConfig(pool_tokens=40, chunk_tokens=4)
    pager = filled(numbers(geometry, 60), geometry, config)
    pager.pin(8, 16)
    before = state(pager)
    for hi in (32, 1 << 60):
        with refused(PinRefused, "pin.too-many", "3 chunks"):
            pager.pin(20, hi)
        assert state(pager) == before
    pager.pin(0, 4)  # a sink stays anyway
    pager.pin(8, 16)  # as these do already
    pager.pin(20, 24)
    with pytest.raises(PinRefused):
        pager.pin(24, 25)
    assert pager.pins == {0, 2, 3, 5} and pager.room >= 1


def test_a_pin_that_a_filling_span_leaves_no_block_for_is_refused(geometry, config):
    rows = numbers(geometry, 60)
    pager = filled(rows[:, :, :, :40], geometry, config, step=4)
    pager.alloc_span(40, pager.room)
    before = state(pager)
    with refused(PinRefused, "pin.filling"):
        pager.pin(8, 9)
    assert state(pager) == before
    write(pager, rows)
    pager.pin(8, 9)
    assert 2 in pager.resident


def test_a_pin_of_what_is_to_come_holds_when_it_comes(geometry, config):
    pager = new(geometry, config)
    pager.pin(8, 12)
    rows = numbers(geometry, 100)
    while pager.length < 100:
        append(pager, rows, 1)
    assert 2 in pager.resident and pager.check() == []


# Reselection


def test_reselect_takes_the_highest_scores(geometry, config):
    rows = random_bits(geometry, 80)
    pager = filled(rows, geometry, config, "oracle")
    pager.set_scores([float(chunk in (3, 7)) for chunk in range(20)])
    moves = pager.reselect()
    assert pager.resident == (0, 3, 7, 15, 16, 17, 18, 19)
    assert set(moves.ins) <= {3, 7} and len(moves.outs) == len(moves.ins) and len(moves) == 2 * len(moves.ins)
    assert pager.reselect() == Moves() and holds(pager, rows) and pager.check() == []


def test_a_chunk_that_was_never_scored_stays(geometry, config):
    pager = filled(numbers(geometry, 48), geometry, config, "oracle")
    pager.set_scores([9.0] * 4 + [None] + [9.0] * 6)
    pager.reselect()
    assert 4 in pager.resident


def test_scores_are_finite_and_no_more_than_chunks(geometry, config):
    pager = filled(numbers(geometry, 16), geometry, config)
    before = state(pager)
    with refused(NonFinite, "non-finite.score", "chunk 1", "nan"):
        pager.set_scores([1.0, float("nan")])
    with refused(PagerError, "pager.score-count", "5 scores"):
        pager.set_scores([0.0] * 5)
    assert state(pager) == before


# Order


def test_logical_order_does_not_depend_on_blocks(geometry):
    config, rows = PagerConfig(pool_tokens=48, chunk_tokens=4), random_bits(geometry, 90)
    plain = filled(rows, geometry, config)
    slots = set()
    for seed in range(25):
        order = random.Random(seed).sample(range(12), 12)
        other = filled(rows, geometry, config, block_order=order)
        for layer in range(2):
            a, b = plain.gather(layer), other.gather(layer)
            assert same_bits(a.k, b.k) and same_bits(a.v, b.v) and a.positions.tolist() == b.positions.tolist()
            assert b.k.is_contiguous() and b.v.is_contiguous()
        slots.add(tuple(other.gather(0, order="slot").positions.tolist()))
    assert len(slots) > 20


def test_slot_order_holds_the_same_rows(geometry, config):
    rows = random_bits(geometry, 30)
    pager = filled(rows, geometry, config, block_order=[5, 2, 7, 0, 1, 6, 3, 4])
    plain, slots = pager.gather(1), pager.gather(1, order="slot")
    back = slots.positions.argsort()
    assert slots.positions.tolist() != plain.positions.tolist()
    assert same_bits(slots.k[:, back], plain.k) and same_bits(slots.v[:, back], plain.v)


# Snapshots


@pytest.mark.parametrize("policy", ["lru", "oracle", "random"])
def test_a_restored_pager_has_the_ledger_that_was_saved(geometry, config, policy):
    rows = random_bits(geometry, 75)
    pager = filled(rows, geometry, config, policy)
    pager.set_scores([float(chunk * 5 % 7) for chunk in range(pager.sealed)])
    pager.reselect()
    payloads, ledger, length = saved(pager)
    other = Pager.restored(geometry, config, build(policy, geometry), iter(payloads), ledger, length)
    assert other.check() == [] and holds(other, rows)
    assert other.ledger() == ledger and saved(other)[1] == ledger and other.length == length == 72
    # what is resident lies in the pool alone, and the rest in host memory alone
    assert other.stats.host_bytes == (18 - len(ledger.resident)) * geometry.chunk_bytes


@pytest.mark.parametrize("policy", ["lru", "oracle", "random"])
def test_a_restored_pager_evicts_what_the_first_one_evicts(geometry, config, policy):
    rows = random_bits(geometry, 200)

    def go_on(pager: Pager) -> list[tuple[int, ...]]:
        seen = []
        while pager.length < 200:
            append(pager, rows, min(3, 200 - pager.length))
            if pager.length % 4 == 0:
                pager.set_scores([float(chunk * 11 % 13) for chunk in range(pager.sealed)])
                pager.page_in(pager.length // 7)
                pager.reselect()
            seen.append((pager.resident, pager.chunks.clock))
        return seen

    cold = filled(rows[:, :, :, :80], geometry, config, policy)
    order = [3, 1, 7, 6, 0, 2, 5, 4]
    warm = Pager.restored(geometry, config, build(policy, geometry), *saved(cold), block_order=order)
    assert go_on(warm) == go_on(cold)
    assert all(same_bits(cold.gather(layer).k, warm.gather(layer).k) for layer in range(2))


def test_a_smaller_pool_keeps_the_protected_then_the_best_then_the_latest(geometry):
    wide, narrow = PagerConfig(pool_tokens=48, chunk_tokens=4), PagerConfig(pool_tokens=32, chunk_tokens=4)
    rows = random_bits(geometry, 48)
    pager = filled(rows, geometry, wide)
    pager.set_scores([-1.0, 3.0, 1.0, 3.0, None, 2.0, 3.0, -5.0, -5.0, -5.0, -5.0, -5.0])
    pager.page_in(1)  # used last of those with 3.0
    other = Pager.restored(geometry, narrow, build("lru", geometry), *saved(pager))
    assert other.resident == (0, 1, 4, 7, 8, 9, 10, 11)  # a chunk without a score counts as the best
    assert holds(other, rows) and other.check() == []


def test_a_larger_pool_holds_what_the_ledger_says(geometry, config):
    pager = filled(random_bits(geometry, 80), geometry, config)
    other = Pager.restored(geometry, PagerConfig(80, 4), build("lru", geometry), *saved(pager))
    assert other.ledger() == pager.ledger() and other.reselect().ins == tuple(range(1, 13))


def test_a_prefix_of_a_snapshot_has_its_own_tail(geometry, config):
    rows = random_bits(geometry, 80)
    payloads, ledger, _ = saved(filled(rows, geometry, config))
    other = Pager.restored(geometry, config, build("lru", geometry), payloads[:9], ledger, 36)
    assert other.resident == (0, 4, 5, 6, 7, 8) and other.check() == [] and holds(other, rows)


def test_after_the_end_of_a_ledger_nothing_is_known(geometry, config):
    payloads = [chunk_of(random_bits(geometry, 48), chunk, geometry) for chunk in range(12)]
    ledger = Ledger((ChunkEntry(True, 1.0, 3), ChunkEntry(True, 2.0, 5)), clock=7)
    other = Pager.restored(geometry, config, build("oracle", geometry), payloads, ledger, 48)
    assert other.resident == (0, 1, 7, 8, 9, 10, 11) and other.ledger().entries[2] == UNKNOWN
    assert other.ledger().clock == 7


def test_a_restore_that_fails_leaves_the_live_pager_alone(geometry, config):
    rows = random_bits(geometry, 60)
    live = filled(rows, geometry, config)
    payloads, ledger, length = saved(live)
    before = state(live)
    broken = [
        (payloads[:-1], length),
        ([*payloads, payloads[0]], length),
        (payloads, length - 1),
        ([*payloads[:5], payloads[5].half(), *payloads[6:]], length),
        ([*payloads[:5], payloads[5][:1], *payloads[6:]], length),
        ([*payloads[:5], payloads[5].transpose(3, 4), *payloads[6:]], length),
    ]
    for given, tokens in broken:
        with pytest.raises(LayoutMismatch):
            Pager.restored(geometry, config, live.policy, given, ledger, tokens)
    with pytest.raises(OSError):
        Pager.restored(geometry, config, live.policy, failing(payloads), ledger, length)
    assert state(live) == before and holds(live, rows)


def failing(payloads):
    yield from payloads[:7]
    raise OSError("the disk is gone")


def test_a_restored_pager_shares_no_memory_with_what_it_was_given(geometry, config):
    rows = random_bits(geometry, 60)
    payloads, ledger, length = saved(filled(rows, geometry, config))
    other = Pager.restored(geometry, config, build("lru", geometry), payloads, ledger, length)
    for payload in payloads:
        payload.zero_()
    assert holds(other, rows)


def test_an_empty_pager_is_restored_empty(geometry, config):
    other = Pager.restored(geometry, config, build("lru", geometry), [], Ledger((), 0), 0)
    assert other.length == 0 and other.check() == [] and other.room == 32


def test_a_ledger_refuses_what_cannot_be():
    with pytest.raises(NonFinite):
        ChunkEntry(True, float("-inf"), 0)
    with refused(ParamsError, None, "last_use is -1"):
        ChunkEntry(True, None, -1)
    with refused(ParamsError, "params.ledger-clock", "chunk 1", 5, 4):
        Ledger((ChunkEntry(True, None, 1), ChunkEntry(True, None, 5)), clock=4)
    ledger = Ledger((ChunkEntry(True, 1.0, 1), ChunkEntry(False, None, 2)), clock=4)
    assert ledger.entry(7) == UNKNOWN and len(ledger.upto(1)) == 1 and ledger.resident == (0,)


# The checks themselves


def damaged(pager: Pager, how: str) -> None:
    chunks = pager.chunks
    if how == "share":
        chunks[1].block = chunks[2].block
    elif how == "leak":
        chunks.pool.free.pop()
    elif how == "nowhere":
        chunks[1].host = chunks[1].block = None
    elif how == "differs":
        chunks[2].host.view(torch.uint8)[0] ^= 1
    elif how == "clock":
        chunks.clock = 0
    elif how == "tail":
        chunks.page_out(6)
    elif how == "host memory":
        chunks[7].host = torch.zeros(())
    elif how == "after the last":
        pager._written[0] += 9
    elif how == "turn over":
        pager.pins = frozenset(range(1, 7))
    elif how == "tokens":
        pager.length += 4


@pytest.mark.parametrize(
    "how",
    [
        "share",
        "leak",
        "nowhere",
        "differs",
        "clock",
        "tail",
        "host memory",
        "after the last",
        "turn over",
        "tokens",
    ],
)
def test_a_broken_invariant_is_named(geometry, how):
    pager = filled(numbers(geometry, 30), geometry, PagerConfig(pool_tokens=40, chunk_tokens=4))
    pager.page_out(1)
    pager.page_out(2)
    pager.page_in(2)
    assert pager.check() == []
    damaged(pager, how)
    names = {"leak": "not all blocks", "share": "share a block"}
    assert any(names.get(how, how) in fault for fault in pager.check())


@pytest.mark.parametrize("order", ["logical", "slot"])
def test_columns_are_what_will_be_gathered_once_all_places_are_written(geometry, config, order):
    rows = numbers(geometry, 60)
    pager = filled(rows[:, :, :, :57], geometry, config, step=3, block_order=[5, 1, 7, 0, 2, 6, 4, 3])
    pager.alloc_span(57, 3)
    columns = pager.columns(order)
    write(pager, rows)
    assert columns.tolist() == pager.gather(1, order).positions.tolist()
    with pytest.raises(UnknownName):
        pager.columns("other")
