"""Shortest remaining time first is what brute force finds, and fewer bits a value make swapping pay sooner."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from kvlab.core.errors import UserError
from kvlab_mechanisms.serving.arrivals import AZURE_CONV, made, scaled
from kvlab_mechanisms.serving.policies.preempt import Switch, one_server, remaining_first
from kvlab_mechanisms.serving.simulate import simulate
from kvlab_mechanisms.serving.worker import Costs, Worker, WorkerShape
from refusals import refused

pytestmark = pytest.mark.full

COSTS = Costs(step=4e-3, prefill=2e-5, pair=1e-8, decode=1e-4, read=5e-7)
SWITCH = Switch(COSTS, 512, 23040, 1e9, setup=5e-3)


def small(seed: int) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    return [(chance.randint(0, 5), chance.randint(1, 4)) for _ in range(chance.randint(1, 5))]


def best_flow(jobs: list[tuple[int, int]]) -> float:
    """The least total flow time of any preemptive schedule in whole units, all of which are tried."""

    @cache
    def least(now: int, left: tuple[int, ...]) -> float:
        if not any(left):
            return 0
        able = [j for j, one in enumerate(left) if one and jobs[j][0] <= now]
        waiting = sum(jobs[j][0] <= now and one > 0 for j, one in enumerate(left))
        if not able:
            return least(now + 1, left)
        return waiting + min(least(now + 1, (*left[:j], left[j] - 1, *left[j + 1 :])) for j in able)

    return least(0, tuple(size for _, size in jobs)) / len(jobs)


def flow_of(jobs: list[tuple[int, int]], key) -> float:
    """Mean flow time without preemption, by a key of the jobs that wait."""
    left, now, total = list(jobs), 0, 0
    while left:
        here = [job for job in left if job[0] <= now] or [min(left)]
        job = min(here, key=key)
        left.remove(job)
        now = max(now, job[0]) + job[1]
        total += now - job[0]
    return total / len(jobs)


@pytest.mark.parametrize("seed", range(60))
def test_with_no_cost_it_is_what_brute_force_finds(seed):
    jobs = small(seed)
    found = one_server(jobs).mean([t for t, _ in jobs])
    assert found == pytest.approx(best_flow(jobs))
    assert found <= flow_of(jobs, lambda job: job[0]) + 1e-9  # first come first served
    assert found <= flow_of(jobs, lambda job: job[1]) + 1e-9  # shortest job first


def test_a_switch_that_costs_more_than_it_saves_is_not_made():
    jobs = [(0.0, 10.0), (1.0, 8.0), (2.0, 1.0)]
    assert one_server(jobs, cost=2.0).preemptions == 1
    assert one_server(jobs, cost=2.0).switching == 2.0
    assert one_server(jobs, cost=100.0).preemptions == 0


def test_ageing_bounds_waiting():
    jobs = [(0.0, 1.0), (0.1, 5.0)] + [(0.5 * i, 0.6) for i in range(200)]
    starved, aged = one_server(jobs), one_server(jobs, ageing=1.0)
    assert starved.ends[1] > 100
    # whoever comes 5 / 1 seconds later is not served before; 11 came until then
    assert aged.ends[1] < 0.1 + 5 + 5 + 12 * 0.6
    assert remaining_first(lambda job: 1.0, 2.0)(replace_job(t=3.0)) == 7.0
    with refused(UserError, None, "ageing -1"):
        remaining_first(lambda job: 1.0, -1)


def replace_job(t: float):
    from kvlab_mechanisms.serving.worker import Job

    return Job(0, t, 1, 1, -1, 0)


def test_fewer_bits_break_even_sooner():
    found = [replace(SWITCH, token_bytes=bits * 2880 / 2).break_even() for bits in (16, 8, 4, 2, 1)]
    assert all(one is not None for one in found)
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]
    assert replace(SWITCH, bandwidth=1.0).break_even(4096) is None
    assert replace(SWITCH, setup=0.0, bandwidth=1e12).break_even() == 1


@pytest.mark.parametrize("size", [46080, 23040, 5000])
def test_from_the_break_even_on_swapping_is_never_dearer(size):
    own = replace(SWITCH, token_bytes=size)
    start = own.break_even()
    for tokens in range(start, start + 3000):
        assert 2 * own.one_way(tokens) <= own.recompute(tokens) + 1e-12
        assert own.cost(tokens) == pytest.approx(2 * own.one_way(tokens))
    assert start == 1 or own(start - 1) is None


def test_preemption_in_the_simulator_counts_what_is_lost_and_moved():
    trace = made(400, scaled(AZURE_CONV, 0.1, rate=120.0), 5)
    shape = WorkerShape(80_000, 32.0)
    plain = simulate(trace, [Worker(COSTS, shape)])
    swapped = simulate(trace, [Worker(COSTS, shape, swap=Switch(COSTS, 512, 32.0, 1e9))])
    assert plain.preemptions > 0
    assert (plain.swaps, plain.moved) == (0, 0.0)
    assert plain.lost > 0
    assert swapped.swaps == swapped.preemptions > 0
    assert swapped.lost == 0
    assert swapped.moved > 0
    assert swapped.tokens == plain.tokens == trace.output.sum()
    assert not np.isnan(swapped.latency).any()
    short = simulate(trace, [Worker(COSTS, shape, order=remaining_first(lambda job: job.output - job.made, 0.01))])
    assert np.mean(short.latency) < np.mean(plain.latency)
