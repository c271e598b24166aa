"""What to reserve for the KV cache: the published cases, its properties, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import ParamsError
from kvlab_mechanisms.memory.reservation import Demand, disables_pool, reserve
from refusals import refused
from tiers import examples

pytestmark = pytest.mark.full

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PUBLISHED = Demand(
    kv_bytes_per_tok=80 * KIB,
    max_ctx=65536,
    pool=0,
    gpu_total=24 * GIB,
    core=3 * GIB + 122 * MIB,
    experts_total=13 * GIB + 195 * MIB,
    warm=200 * MIB,
    safety=256 * MIB,
    draft=1200 * MIB,
)


def published(ctx: int, pool: int):
    return reserve(replace(PUBLISHED, max_ctx=ctx, pool=pool))


@pytest.mark.parametrize(
    "ctx, pool, kv_ctx, all_hot, reduced, redundant",
    [
        pytest.param(65536, 0, 65536, True, False, False, id="C1"),
        pytest.param(65536, 49152, 65536, True, False, True, id="C2"),
        pytest.param(131072, 49152, 49152, False, True, False, id="C3"),
        pytest.param(131072, 0, 131072, False, False, False, id="C4"),
        pytest.param(32768, 49152, 32768, True, False, True, id="C5"),
    ],
)
def test_published_cases(ctx, pool, kv_ctx, all_hot, reduced, redundant):
    found = published(ctx, pool)
    assert found.kv_ctx == kv_ctx and found.kv_total == kv_ctx * 80 * KIB and found.fits
    assert (found.all_hot_full_kv, found.pool_reduced, found.pool_redundant) == (all_hot, reduced, redundant)


def test_published_numbers():
    assert published(131072, 49152).kv_total == 3.75 * GIB
    left = [published(ctx, 0).left_over / GIB for ctx in (65536, 131072, 32768)]
    assert [round(x, 2) for x in left] == [14.26, 9.26, 16.76]
    assert {published(ctx, 0).hot_ctx for ctx in (65536, 131072)} == {79603}
    assert published(79603, 0).all_hot_full_kv and not published(79604, 0).all_hot_full_kv


@pytest.mark.parametrize(
    "active, force, cold, ctx, off",
    [
        pytest.param(False, False, None, 65536, False, id="6: nothing was asked for"),
        pytest.param(True, True, None, 65536, False, id="6: forced"),
        pytest.param(True, True, 0, 65536, False, id="6: forced, and no expert is cold"),
        pytest.param(True, False, 0, 131072, True, id="7: a split left no expert cold"),
        pytest.param(True, False, 5, 65536, False, id="7: a split left some cold"),
        pytest.param(True, False, None, 65536, True, id="all hot beside the full cache"),
        pytest.param(True, False, None, 131072, False, id="not all hot"),
    ],
)
def test_published_cases_of_switching_the_pool_off(active, force, cold, ctx, off):
    found = published(ctx, 49152)
    assert disables_pool(found, active=active, force=force, cold_experts=cold) is off


amounts = st.integers(0, 64 * GIB)
demands = st.builds(
    Demand,
    kv_bytes_per_tok=st.integers(1, 1 * MIB),
    max_ctx=st.integers(1, 1 << 18),
    pool=st.integers(0, 1 << 18),
    gpu_total=st.integers(1, 96 * GIB),
    core=st.integers(1, 32 * GIB),
    experts_total=st.one_of(st.just(0), amounts),
    warm=st.integers(0, GIB),
    safety=st.integers(0, GIB),
    draft=st.integers(0, 4 * GIB),
)


@examples(300)
@given(demands)
def test_a_reservation_is_consistent(demand):
    found = reserve(demand)
    full = demand.kv_bytes_per_tok * demand.max_ctx
    assert found.kv_total == found.kv_ctx * demand.kv_bytes_per_tok <= full
    assert found.pool_reduced == (found.kv_total < full)
    assert not (found.pool_reduced and (found.all_hot_full_kv or found.pool_redundant))
    assert not found.pool_redundant or demand.pool
    assert found.left_over >= 0 and (found.fits or found.left_over == 0)
    assert not found.all_hot_full_kv or (found.fits and found.left_over >= demand.experts_total)
    assert found.hot_ctx == 0 or reserve(replace(demand, max_ctx=found.hot_ctx)).all_hot_full_kv
    assert not reserve(replace(demand, max_ctx=found.hot_ctx + 1)).all_hot_full_kv


@examples(300)
@given(demands, st.integers(1, 1 << 18), st.integers(1, 1 << 18))
def test_a_larger_pool_leaves_no_more_and_any_pool_no_less_than_none(demand, one, other):
    small, large = sorted((one, other))
    none, less, more = (reserve(replace(demand, pool=pool)) for pool in (0, small, large))
    assert none.kv_total >= more.kv_total >= less.kv_total
    assert none.left_over <= more.left_over <= less.left_over
    assert none.all_hot_full_kv == more.all_hot_full_kv == less.all_hot_full_kv


@examples(300)
@given(demands, st.integers(0, 64 * GIB))
def test_a_larger_gpu_never_holds_fewer_experts(demand, more):
    def hot(found) -> int:
        return min(found.left_over, demand.experts_total)

    small, large = reserve(demand), reserve(replace(demand, gpu_total=demand.gpu_total + more))
    assert hot(large) >= hot(small) and large.hot_ctx >= small.hot_ctx
    assert large.all_hot_full_kv or not small.all_hot_full_kv


@examples(200)
@given(demands, st.integers(1, 1 << 18))
def test_a_longer_context_reserves_no_less_unless_its_pool_begins_to_count(demand, more):
    short, long = reserve(demand), reserve(replace(demand, max_ctx=demand.max_ctx + more))
    assert long.kv_total >= short.kv_total or (long.pool_reduced and not short.pool_reduced)


def test_what_does_not_fit_leaves_nothing_and_is_never_hot():
    """An unsigned difference would have wrapped around here; a model without experts would have been all hot."""
    full = replace(PUBLISHED, gpu_total=2 * GIB, experts_total=0)
    found = reserve(full)
    assert (found.left_over, found.fits, found.all_hot_full_kv, found.hot_ctx) == (0, False, False, 0)
    assert reserve(replace(full, gpu_total=24 * GIB)).all_hot_full_kv


@pytest.mark.parametrize("name", ["kv_bytes_per_tok", "max_ctx", "gpu_total", "core"])
@pytest.mark.parametrize("value", [0, -1])
def test_zero_and_negative_sizes_are_refused(name, value):
    with refused(ParamsError, None, f"{name} is {value}", "from 1"):
        replace(PUBLISHED, **{name: value})


@pytest.mark.parametrize("name", ["pool", "experts_total", "warm", "safety", "draft"])
def test_negative_amounts_are_refused(name):
    replace(PUBLISHED, **{name: 0})
    for value in (-1, 1.5, True, None, "3"):
        with refused(ParamsError, None, f"{name} is {value!r}"):
            replace(PUBLISHED, **{name: value})


def test_a_negative_count_of_cold_experts_is_refused():
    with refused(ParamsError, None, "cold_experts", -1):
        disables_pool(published(65536, 49152), active=True, cold_experts=-1)
