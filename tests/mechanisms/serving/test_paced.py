"""A client that policies pace does what the simulator says that they do, on a clock that only sleeping moves."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.core.errors import UserError
from kvlab_mechanisms.serving.paced import ClientTimes, pace
from kvlab_mechanisms.serving.policies.gateway import FAILURES, Gateway
from kvlab_mechanisms.serving.policies.preempt import remaining_first
from kvlab_mechanisms.serving.policies.ratelimit import NANO, RateLimit
from kvlab_mechanisms.serving.simulate import simulate
from kvlab_mechanisms.serving.trace import Trace, columns
from kvlab_mechanisms.serving.worker import Costs, Worker, WorkerShape, first_come
from refusals import refused

pytestmark = pytest.mark.full

COSTS = Costs(step=0.0, prefill=2e-3, pair=0.0, decode=0.05, read=0.0)
SHAPE = WorkerShape(1 << 30, 1.0, 16, chunk=100_000, most=1, prefixes=False)


class Selector(selectors.SelectSelector):
    """Waits for nothing: whoever sleeps wakes as soon as nobody else has anything to do."""

    now = 0.0

    def select(self, timeout=None):
        self.now += max(timeout or 0.0, 0.0)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock only sleeping moves."""

    def __init__(self):
        self.still = Selector()
        super().__init__(self.still)

    def time(self) -> float:
        return self.still.now


def run(trace: Trace, ask=None, **settings) -> ClientTimes:
    loop = Loop()

    async def served(_worker: int, number: int) -> AsyncIterator[None]:
        await asyncio.sleep(COSTS.prefill * trace.prompt[number])
        yield
        for _ in range(trace.output[number] - 1):
            await asyncio.sleep(COSTS.decode)
            yield

    try:
        return loop.run_until_complete(pace(trace, ask or served, clock=loop.time, **settings))
    finally:
        loop.close()


@st.composite
def traces(draw) -> Trace:
    chance = np.random.default_rng(draw(st.integers(0, 10_000)))
    n = draw(st.integers(1, 40))
    t = np.cumsum(chance.exponential(draw(st.sampled_from([0.02, 0.3])), n))
    rows = zip(t, chance.integers(1, 300, n), chance.integers(1, 12, n), chance.integers(-1, 4, n), strict=True)
    return columns((when, prompt, output, prefix, min(prompt, 16)) for when, prompt, output, prefix in rows)


def gateway(workers: int, policy: str) -> Gateway:
    found = Gateway(policy)
    for worker in range(workers):
        found.register(worker, capacity=5)
    return found


def front(trace: Trace):
    """At most 20 tokens of answers a second, 30 at once."""
    limit = RateLimit(20, 30)
    return lambda t, number: limit.consume("all", int(trace.output[number]), round(t * NANO)).allowed


@settings(deadline=None)
@given(
    trace=traces(), workers=st.integers(1, 3), policy=st.sampled_from(["least", "prefix"]), limited=st.booleans(),
    ageing=st.sampled_from([None, 0.0, 0.3]),
)  # fmt: skip
def test_it_is_what_is_simulated(trace, workers, policy, limited, ageing):
    order = first_come if ageing is None else remaining_first(lambda job: COSTS.prompt(job.prompt, 512), ageing)
    asked = {"front": front(trace) if limited else None, "order": order}
    seen = run(trace, workers=workers, slots=1, router=gateway(workers, policy), **asked)
    due = simulate(
        trace, [Worker(COSTS, SHAPE, order) for _ in range(workers)], gateway(workers, policy),
        front(trace) if limited else None,
    )  # fmt: skip
    assert np.allclose(seen.came, trace.t) and not seen.failed
    assert seen.denied.sum() == due.denied and np.array_equal(seen.denied, np.isnan(due.ttft))
    assert np.allclose(seen.ttft, due.ttft, equal_nan=True) and np.allclose(seen.tpot, due.tpot, equal_nan=True)
    if not seen.denied.all():
        assert seen.tokens_per_s == pytest.approx(due.tokens / (np.nanmax(seen.last) - trace.t[0]))


def test_no_worker_is_asked_for_more_than_it_has_room_for():
    trace, now, most = columns((0.0, 10, 3, -1, 0) for _ in range(20)), {0: 0, 1: 0}, {0: 0, 1: 0}

    async def ask(worker: int, number: int) -> AsyncIterator[None]:
        now[worker] += 1
        most[worker] = max(most[worker], now[worker])
        await asyncio.sleep(0.1)
        yield
        now[worker] -= 1

    seen = run(trace, ask, workers=2, slots=3)
    assert most == {0: 3, 1: 3} and not np.isnan(seen.last).any()


def test_a_worker_that_fails_a_request_goes_on_with_others():
    trace, router = columns((0.1 * i, 10, 3, -1, 0) for i in range(6)), gateway(1, "least")

    async def ask(_worker: int, number: int) -> AsyncIterator[None]:
        await asyncio.sleep(0.5)
        yield
        if number % 2:
            raise ConnectionError("gone")

    seen = run(trace, ask, slots=2, router=router)
    assert seen.failed == tuple((number, "ConnectionError: gone") for number in (1, 3, 5))
    assert np.isnan(seen.last).tolist() == [False, True] * 3 and router.load == {0: 0}


def test_a_worker_that_fails_again_and_again_is_passed_over():
    asked = []

    async def ask(worker: int, _number: int) -> AsyncIterator[None]:
        asked.append(worker)
        await asyncio.sleep(0.01)
        if worker == 0:
            raise ConnectionError("gone")
        yield

    seen = run(columns((0.1 * i, 10, 3, -1, 0) for i in range(12)), ask, workers=2, router=gateway(2, "least"))
    assert len(seen.failed) == asked.count(0) == FAILURES and set(asked[-6:]) == {1}


def test_a_router_that_takes_nobody_denies_all():
    trace = columns((0.1 * i, 10, 3, -1, 0) for i in range(4))
    assert run(trace, router=Gateway()).denied.all()


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"slots": 0}])
def test_there_has_to_be_room(wrong):
    with refused(UserError, "user.no-slots", *(f"{value} {name}" for name, value in wrong.items())):
        run(columns([(0.0, 1, 1, -1, 0)]), **wrong)
