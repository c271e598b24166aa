"""The gateway: never above capacity, never to who is down, and what brute force would choose."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from kvlab.core.errors import UnknownName, UserError
from kvlab_mechanisms.serving.arrivals import AZURE_CONV, made, scaled
from kvlab_mechanisms.serving.policies.gateway import POINTS, STALE, Gateway
from kvlab_mechanisms.serving.simulate import simulate
from kvlab_mechanisms.serving.worker import Costs, Worker, WorkerShape
from refusals import refused

pytestmark = pytest.mark.full


def gateway(count: int, policy="least", capacity=1 << 30, **more) -> Gateway:
    found = Gateway(policy, **more)
    for worker in range(count):
        found.register(worker, capacity)
    return found


@pytest.mark.parametrize("policy", ["least", "two", "prefix"])
@pytest.mark.parametrize("seed", range(4))
def test_random_lives_never_break_the_rules(policy, seed):
    chance, own = random.Random(seed), Gateway(policy)
    capacity, down, held = {}, set(), []
    for step in range(1500):
        what = chance.random()
        if what < 0.02 or not capacity:
            capacity[step] = chance.randint(1, 5)
            own.register(step, capacity[step])
        elif what < 0.03:
            gone = chance.choice(list(capacity))
            own.deregister(gone)
            del capacity[gone]
            down.discard(gone)
            held = [one for one in held if one != gone]
        elif what < 0.06:
            worker, well = chance.choice(list(capacity)), chance.random() < 0.5
            own.healthy(worker, well)
            (down.discard if well else down.add)(worker)
        elif what < 0.4 and held:
            own.complete(held.pop(chance.randrange(len(held))))
        else:
            able = [one for one in capacity if one not in down and held.count(one) < capacity[one]]
            before = {one: held.count(one) / capacity[one] for one in able}
            found = own.route(chance.choice([-1, 1, 2, 3]))
            assert (found in able) if able else found is None
            if able:
                if policy == "least":
                    assert found == min(able, key=lambda one: (before[one], one))
                held.append(found)


def test_equal_workers_are_loaded_equally():
    own = gateway(7)
    for _ in range(100):
        own.route()
        assert max(own.load.values()) - min(own.load.values()) <= 1


def test_a_version_is_honoured_or_nobody_takes_it():
    own = Gateway()
    own.register(0, 1, "exact")
    own.register(1, 9, "klt4")
    assert own.route(version="exact") == 0
    assert own.route(version="exact") is None
    assert own.route(version="klt4") == 1
    assert own.route(version="other") is None


def test_two_choices_keep_the_worst_load_low():
    own, count = gateway(1000, "two"), 1000
    for _ in range(count):
        own.route()
    assert max(own.load.values()) <= math.log(math.log(count)) / math.log(2) + 3
    chance = np.random.default_rng(0)
    assert max(own.load.values()) < np.bincount(chance.integers(0, count, count)).max()


def test_affinity_bounds_the_load():
    own = gateway(10, "prefix", bound=1.25)
    for total in range(1, 400):
        own.route(42 if total % 2 else total)
        assert max(own.load.values()) <= math.ceil(1.25 * total / 10)


def test_affinity_outlives_a_worker():
    before, after = gateway(20, "prefix", bound=1e9), gateway(20, "prefix", bound=1e9)
    after.deregister(7)
    moved = [key for key in range(2000) if before.route(key) not in (after.route(key), 7)]
    assert moved == []
    assert 0.02 < before.load[7] / 2000 < 0.1


def test_the_ring_does_not_depend_on_when_it_was_asked():
    asked, other = Gateway("prefix", bound=1e9), Gateway("prefix", bound=1e9)
    for worker in range(30):
        for own in (asked, other):
            own.register(worker)
        asked.complete(asked.route(worker))
        if worker % 5 == 4:
            for own in (asked, other):
                own.deregister(worker - worker % 3)
    keys = [asked.route(key) for key in range(500)]
    assert keys == [other.route(key) for key in range(500)]
    assert len(set(keys)) == 24


@pytest.mark.parametrize("policy", ["least", "two", "prefix"])
def test_as_many_workers_as_a_service_has(policy):
    own = gateway(3000 if policy == "prefix" else 100_000, policy)
    assert own.route(7) in own.load


def test_failures_in_a_row_break_the_circuit():
    own = gateway(1)
    for _ in range(3):
        own.route()
    for _ in range(3):
        own.complete(0, ok=False)
    assert own.route() is None
    own.healthy(0, True)
    assert own.route() == 0


def test_mistakes_are_refused():
    own = gateway(1)
    with refused(UserError, "user.no-request", 0):
        own.complete(0)
    with refused(UserError, "user.worker-or-capacity", 0):
        own.register(0)
    with refused(UnknownName, None, "policy", "prefixes", repr("prefix")):
        Gateway("prefixes")
    with pytest.raises(UnknownName):
        own.complete(5)


def test_affinity_is_worth_more_than_balance_in_the_simulator():
    costs = Costs(step=4e-3, prefill=2e-4, pair=1e-8, decode=1e-4, read=5e-7)
    own = replace(scaled(AZURE_CONV, 0.1, rate=60.0), share=1.0, prefixes=40, prefix_tokens=320)
    trace, found = made(1500, own, 2), {}
    for policy in ("least", "prefix"):
        workers = [Worker(costs, WorkerShape(4000, 1.0)) for _ in range(8)]
        found[policy] = simulate(trace, workers, gateway(8, policy))
    assert np.median(found["prefix"].ttft) < 0.8 * np.median(found["least"].ttft)


def test_a_long_life_takes_no_more_memory_and_goers_leave_no_keys():
    own = gateway(8)
    busy = [own.route() for _ in range(20)]
    for _ in range(3000):
        own.complete(busy.pop(0))
        busy.append(own.route())
    assert sum(map(len, own._heaps.values())) <= STALE * 8 + POINTS
    assert max(own.load.values()) - min(own.load.values()) <= 1
    ring = gateway(40, "prefix")
    before = {key: ring.route(key) for key in range(200)}
    for worker in range(0, 40, 2):
        ring.deregister(worker)
    ring.register(0)  # comes back, with the points that it had
    after = {key: ring.route(key) for key in range(200)}
    assert {after[key] for key in before} <= {0, *range(1, 40, 2)}
    assert len(ring._ring) == POINTS * 21
