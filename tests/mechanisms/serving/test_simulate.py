"""The simulator, which walks changes, is held against one that walks every step of every sequence."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvlab.core.errors import Fault, UserError
from kvlab_mechanisms.serving.arrivals import AZURE_CONV, made, scaled
from kvlab_mechanisms.serving.simulate import Slo, simulate
from kvlab_mechanisms.serving.trace import columns
from kvlab_mechanisms.serving.worker import Costs, Worker, WorkerShape
from refusals import refused

COSTS = Costs(step=4e-3, prefill=2e-5, pair=1e-8, decode=1e-4, read=5e-7)
SMALL = scaled(AZURE_CONV, 0.1, rate=12.0)


def walked(trace, costs: Costs, shape: WorkerShape) -> tuple[list[float], list[float], int]:
    """First and last tokens and preemptions, a step at a time, without shared beginnings."""
    size, now, at, preemptions = len(trace), 0.0, 0, 0
    pages = lambda tokens: -(-tokens // shape.page)  # noqa: E731
    first, last, waiting, active = [math.nan] * size, [math.nan] * size, [], []  # active: in the order of entry
    made_, computed, todo = [0] * size, [0] * size, [0] * size
    while at < size or waiting or active:
        if not waiting and not active:
            now = max(now, float(trace.t[at]))
        while at < size and trace.t[at] <= now:
            waiting.append(at)
            at += 1
        waiting.sort()
        held = lambda: sum(pages(computed[r] if not todo[r] else computed[r] + todo[r]) for r in active)  # noqa: E731
        growth = lambda: sum(not todo[r] and computed[r] % shape.page == 0 for r in active)  # noqa: E731
        preempted = False
        while held() + growth() > shape.pages and any(not todo[r] for r in active):
            victim = last_begun([r for r in active if not todo[r]], began)
            active.remove(victim)
            computed[victim] = 0
            waiting.append(victim)
            preemptions, preempted = preemptions + 1, True
        waiting.sort()
        while not preempted and waiting and len(active) < shape.most:
            tokens = int(trace.prompt[waiting[0]]) + made_[waiting[0]]
            if held() + growth() + pages(tokens) > shape.pages:
                break
            todo[waiting[0]] = tokens
            active.append(waiting.pop(0))
        decoding = [r for r in active if not todo[r]]
        if not active:
            continue
        room, seconds = max(1, shape.chunk - len(decoding)), costs.step
        for r in decoding:
            seconds += costs.decode + costs.read * (computed[r] + 1)
        filled = {}
        for r in [r for r in active if todo[r]]:
            filled[r] = min(room, todo[r])
            room -= filled[r]
            for token in range(filled[r]):
                seconds += costs.prefill + costs.pair * (computed[r] + token + 1)
        now += seconds
        for r in decoding:
            computed[r] += 1
            made_[r] += 1
        for r, count in filled.items():
            computed[r] += count
            todo[r] -= count
            if count and not todo[r]:
                if not made_[r]:
                    first[r] = now
                made_[r] += 1
                began[r] = next_number()
        for r in [r for r in active if not todo[r] and made_[r] >= trace.output[r]]:
            last[r] = now
            active.remove(r)
    return first, last, preemptions


began: dict[int, int] = {}


def next_number() -> int:
    return len(began) + max(began.values(), default=0) + 1


def last_begun(found: list[int], order: dict[int, int]) -> int:
    return max(found, key=order.__getitem__)


@pytest.mark.parametrize("seed", range(10))
def test_it_is_the_walk_of_every_step(seed):
    trace = made(60, SMALL, seed)
    pages = (2000, 40, 25)[seed % 3]
    shape = WorkerShape(pages * 16, 1.0, 16, (512, 48)[seed % 2], (64, 3)[seed // 5], prefixes=False)
    keep = [i for i in range(60) if -(-(trace.prompt[i] + trace.output[i]) // 16) <= pages]
    trace = columns([(trace.t[i], trace.prompt[i], trace.output[i], -1, 0) for i in keep])
    began.clear()
    first, last, preemptions = walked(trace, COSTS, shape)
    found = simulate(trace, [Worker(COSTS, shape)])
    assert found.ttft + trace.t == pytest.approx(np.array(first), rel=1e-9)
    assert found.latency + trace.t == pytest.approx(np.array(last), rel=1e-9)
    assert found.preemptions == preemptions


def test_one_request_alone_takes_what_its_steps_take():
    trace = columns([(1.0, 100, 11, -1, 0)])
    found = simulate(trace, [Worker(COSTS, WorkerShape(1 << 20, 1.0))])
    assert found.ttft[0] == pytest.approx(4e-3 + 100 * 2e-5 + 1e-8 * 5050)
    steps = sum(4e-3 + 1e-4 + 5e-7 * (100 + i) for i in range(1, 11))
    assert found.tpot[0] == pytest.approx(steps / 10)


def test_nothing_is_lost_and_every_page_comes_back():
    trace = made(3000, replace(SMALL, share=0.6, prefixes=5, prefix_tokens=100, rate=90.0), 2)
    workers = [Worker(COSTS, WorkerShape(2500, 1.0)) for _ in range(3)]
    found = simulate(trace, workers)
    assert not np.isnan(found.latency).any()
    assert found.tokens == trace.output.sum()
    assert found.preemptions > 0
    for one in workers:
        assert one.memory.available == one.memory.pages
        assert (one.read, one.memory.decoding) == (0, 0)
        assert one.busy <= found.span


def test_the_same_trace_gives_the_same_report():
    trace = made(500, SMALL, 4)
    one, two = (simulate(trace, [Worker(COSTS, WorkerShape(3000, 1.0))]).report(Slo(1, 0.05)) for _ in range(2))
    assert one == two


def test_fewer_bytes_a_token_hold_more_and_preempt_less():
    trace = made(800, scaled(AZURE_CONV, 0.1, rate=60.0), 5)
    found = [simulate(trace, [Worker(COSTS, WorkerShape(80_000, size))]) for size in (32.0, 16.0, 4.0)]
    assert [one.capacity for one in found] == [2496, 4992, 20000]
    assert found[0].preemptions > found[1].preemptions >= found[2].preemptions
    assert np.median(found[0].ttft) > np.median(found[2].ttft)


def test_a_beginning_that_is_kept_is_not_computed_again():
    trace = columns([(float(t), 400, 4, 9, 384) for t in range(5)])
    found = simulate(trace, [Worker(COSTS, WorkerShape(1 << 20, 1.0))])
    plain = simulate(trace, [Worker(COSTS, WorkerShape(1 << 20, 1.0, prefixes=False))])
    assert found.ttft[0] == pytest.approx(plain.ttft[0])
    assert (found.ttft[1:] < 0.7 * plain.ttft[1:]).all()


PROBES = {
    "the same twice": [(0.0, 160, 16, 1, 160), (100.0, 160, 16, 1, 160)],
    "a shorter share": [(0.0, 160, 1, 1, 160), (100.0, 40, 32, 1, 20), (100.0, 40, 32, 1, 20)],
}


@pytest.mark.parametrize("name", PROBES)
def test_a_beginning_that_leaves_no_room_makes_room(name):
    worker = Worker(COSTS, WorkerShape(11 * 16, 1.0))
    found = simulate(columns(PROBES[name]), [worker])
    assert not np.isnan(found.latency).any()
    assert worker.memory.available == worker.memory.pages


REQUEST = st.tuples(
    st.sampled_from([0.0, 0.0, 0.001, 0.05, 0.3, 5.0]), st.integers(1, 200), st.integers(1, 60), st.integers(-1, 3),
    st.integers(0, 200),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.lists(REQUEST, min_size=1, max_size=25),
    st.integers(2, 20),
    st.sampled_from([1, 7, 16]),
    st.sampled_from([8, 512]),
    st.sampled_from([None, 1e-4]),
    st.integers(1, 2),
    st.sampled_from([1, 3, 64]),
)
@example([(0.0, 1, 1, 0, 0), (0.0, 1, 1, 0, 0), (0.0, 69, 16, 0, 0), (0.0, 109, 1, 0, 0)], 12, 1, 8, 1e-4, 1, 3)
def test_every_request_is_served_denied_or_refused(rows, pages, page, chunk, seconds, count, most):
    t = np.cumsum([row[0] for row in rows])
    trace = columns(
        (when, prompt, output, prefix if shared else -1, min(shared, prompt) if prefix >= 0 else 0)
        for when, (_, prompt, output, prefix, shared) in zip(t, rows, strict=True)
    )
    shape = WorkerShape(pages * 16, 1.0, page, chunk, most)
    swap = None if seconds is None else lambda _: seconds
    workers = [Worker(COSTS, shape, swap=swap) for _ in range(count)]
    found = simulate(trace, workers, front=lambda _, number: number % 5 != 4)
    assert found.denied == len(rows) // 5
    assert found.report(Slo())["served"] + found.denied + found.refused == len(rows)
    assert found.refused == sum(
        -(-(prompt + output) // page) > shape.pages
        for number, (_, prompt, output, _, _) in enumerate(rows)
        if number % 5 != 4
    )
    for one in workers:
        assert one.memory.available == one.memory.pages
        assert (one.read, one.memory.decoding) == (0, 0)


def test_a_run_that_leaves_requests_behind_gives_no_figure(monkeypatch):
    monkeypatch.setattr(Worker, "plan", lambda *_: None)
    with refused(Fault, "fault.requests-left", "1 of 1"):
        simulate(columns([(0.0, 10, 5, -1, 0)]), [Worker(COSTS, WorkerShape(320, 1.0))])


def test_what_no_memory_holds_is_refused_and_said():
    found = simulate(columns([(0.0, 1000, 5, -1, 0), (0.0, 10, 5, -1, 0)]), [Worker(COSTS, WorkerShape(320, 1.0))])
    assert found.refused == 1
    assert np.isnan(found.ttft[0])
    assert found.report(Slo())["served"] == 1
    with refused(UserError, "user.no-workers"):
        simulate(columns([(0.0, 1, 1, -1, 0)]), [])


def test_the_front_denies_and_goodput_counts_who_is_in_time():
    trace = made(200, SMALL, 6)
    found = simulate(trace, [Worker(COSTS, WorkerShape(1 << 20, 1.0))], front=lambda _, number: number % 2 == 0)
    assert found.denied == 100
    assert found.goodput(Slo()) == pytest.approx(100 / found.span)
    assert found.goodput(Slo(ttft=0)) == 0


@pytest.mark.nightly
def test_a_million_requests():
    trace = made(1_000_000, scaled(AZURE_CONV, 0.25, rate=70.0), 1)
    found = simulate(trace, [Worker(COSTS, WorkerShape(1 << 16, 1.0)) for _ in range(8)])
    assert found.report(Slo())["served"] == 1_000_000 - found.refused
