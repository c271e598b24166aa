"""Histograms, batches, answers that are kept, and rate limits: each against a brute-force twin."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.core.errors import UserError
from kvlab_mechanisms.serving.policies.batches import Batches, BatchReason
from kvlab_mechanisms.serving.policies.profiler import Histogram, Profiler
from kvlab_mechanisms.serving.policies.ratelimit import NANO, RateLimit
from kvlab_mechanisms.serving.policies.semantic import SemanticCache, Space, threshold_for
from refusals import refused

pytestmark = pytest.mark.full

# ------------------------------------------------------------------------------ rate limits


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 2000),
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(-2 * NANO, 2 * NANO), st.integers(0, 60)), max_size=60),
)
def test_no_clock_mints_tokens(rate, burst, asked):
    own, now, grants, newest, seen = RateLimit(rate, burst), 0, [], [], -(10**18)
    for step, tokens in asked:
        now += step  # backwards too
        seen = max(seen, now)  # time that went by is that of the latest clock that was shown
        if own.consume("a", tokens, now).allowed:
            grants.append((now, tokens))
            newest.append(seen)
    for i in range(len(grants)):
        for j in range(i, len(grants)):
            granted = sum(tokens for _, tokens in grants[i : j + 1])
            assert granted <= burst + Fraction(rate * (newest[j] - newest[i]), NANO)


def test_a_clock_that_was_shown_with_too_large_a_request_counts():
    own = RateLimit(172, 1)
    assert not own.consume("a", 2, 0).allowed  # never granted, and yet it is 0 now
    assert own.consume("a", 1, -1).allowed
    assert not own.consume("a", 1, 5_813_953).allowed and own.consume("a", 1, 5_813_954).allowed


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 500),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, NANO), st.integers(0, 25)), max_size=50),
)
def test_it_is_a_token_bucket(rate, burst, asked):
    own, level, now, before = RateLimit(rate, burst), Fraction(burst), 0, 0
    for step, tokens in asked:
        now += step
        level = min(Fraction(burst), level + Fraction(rate * (now - before), NANO))
        before = now
        answer = own.consume("a", tokens, now)
        assert answer.allowed == (tokens <= level)
        if answer.allowed:
            level -= tokens
        elif answer.wait is not None:
            assert not own.consume("a", tokens, now + answer.wait - 1).allowed
            now = before = now + answer.wait
            level = min(Fraction(burst), level + Fraction(rate * answer.wait, NANO))
            assert own.consume("a", tokens, now).allowed
            level -= tokens
        else:
            assert tokens > burst
        assert own.tokens("a", now) == int(level)


def test_tenants_are_apart_and_forgetting_one_fills_no_bucket():
    own = RateLimit(1, 5, tenants=2)
    for _ in range(200):
        assert own.consume("a", 0, 0).allowed
    assert own.consume("a", 5, 0).allowed
    assert own.consume("b", 5, 0).allowed
    assert not own.consume("a", 1, 0).allowed
    assert not own.consume("c", 1, 0).allowed  # neither bucket is full, so nobody is forgotten
    assert own.consume("c", 1, 5 * NANO).allowed
    assert not own.consume("b", 5, 0).allowed or own.tokens("b", 0) == 0
    with refused(UserError, None, "rate 0.5"):
        RateLimit(0.5, 1)
    with refused(UserError, None, "-1 tokens"):
        own.consume("a", -1, 0)


def test_threads_are_granted_no_more():
    own, granted = RateLimit(1, 100), []

    def ask() -> None:
        granted.extend(own.consume("a", 1, 0).allowed for _ in range(200))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sum(granted) == 100


# ------------------------------------------------------------------------------ histograms


def laws():
    chance = np.random.default_rng(0)
    yield "lognormal", chance.lognormal(-3, 1.5, 20_000)
    yield "bimodal", np.concatenate([chance.normal(0.01, 0.001, 9000), chance.normal(5, 0.1, 1000)]).clip(0)
    yield "constant", np.full(1000, 0.005)
    yield "wide", np.concatenate([np.zeros(10), [1e-9, 1e12], chance.random(50)])


@pytest.mark.parametrize(("name", "values"), list(laws()), ids=lambda one: one if isinstance(one, str) else "")
def test_percentiles_are_within_the_bound(name, values):
    own, single = Histogram(), Histogram()
    own.ingest(values)
    for value in values.tolist():
        single.record(value)
    percents = (50.0, 90.0, 99.0, 99.9)
    found = own.percentiles(percents)
    assert found == single.percentiles(percents)
    for percent, value in zip(percents, found, strict=True):
        exact = np.sort(values)[max(0, int(np.ceil(percent / 100 * len(values))) - 1)]
        assert abs(value - exact) <= exact / 64 + 1e-12, (name, percent)
    assert found == sorted(found)
    assert found[-1] <= own.high == values.max()


def test_a_merge_is_the_union():
    values = np.random.default_rng(1).lognormal(0, 2, 5000)
    whole, one, other = Histogram(), Histogram(), Histogram()
    whole.ingest(values)
    one.ingest(values[:1700])
    other.ingest(values[1700:])
    one.merge(other)
    assert (one.counts, one.total, one.low, one.high) == (whole.counts, whole.total, whole.low, whole.high)
    with refused(UserError, "user.histogram-bits", 4):
        one.merge(Histogram(4))
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError):
            one.record(bad)


def test_threads_lose_no_count_and_epochs_are_forgotten():
    now = iter(range(1000))
    own = Profiler(lambda: float(next(now)))
    threads = [threading.Thread(target=lambda: [own.record("a", 0.5) for _ in range(2000)]) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert own.of("a").total == 8000
    with own.span("b"):
        pass
    assert own.of("b").high == 1.0
    assert 'kvlab_seconds_count{op="a"} 8000' in own.prometheus()
    own.rotate()
    own.record("a", 1.0)
    assert own.of("a").total == 8001
    own.rotate()
    assert own.of("a").total == 1


# ------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("seed", range(25))
def test_batches_are_what_brute_force_finds(seed):
    chance = random.Random(seed)
    mode = ("latency", "throughput", "goodput")[seed % 3]
    own = Batches(mode, chance.uniform(0.01, 0.3), chance.randint(1, 3), 32)
    for _ in range(chance.randint(1, 30)):
        size = chance.randint(1, 32)
        own.record(size, max(1e-4, 0.01 + 0.005 * size + chance.gauss(0, 0.03)))
    line = [own.estimate(size) for size in range(1, 65)]
    assert all(a <= b + 1e-12 for a, b in pairwise(line))
    last = max(own.means)
    assert own.estimate(last + 9) >= own.estimate(last)
    for queue in (0, 1, 5, 32, 100):
        free, each = chance.uniform(0, 4000), 100.0
        found = own.next(queue, free, each)
        cap = min(queue, 32, int(free // each))
        assert min(own.least, cap) <= found.size <= cap
        inside = [size for size in range(min(own.least, cap), cap + 1) if own.estimate(size) <= own.target]
        if mode == "latency" and cap > own.least:
            assert found.size == max(inside, default=own.least)
        if mode == "goodput" and cap > own.least and inside:
            assert found.size / own.estimate(found.size) == pytest.approx(max(s / own.estimate(s) for s in inside))


def test_a_smaller_cache_lets_a_larger_batch_in():
    own = Batches("throughput", most=100)
    sizes = [own.next(100, 1e6, tokens * 500).size for tokens in (46.08, 23.04, 5.8)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2]
    assert own.next(100, 1e6, 46.08 * 500).reason is BatchReason.MEMORY
    assert own.next(0).size == 0


def test_the_running_mean_and_growth_without_data():
    own = Batches(weight=0.3, target=1.0)
    assert own.next(9).reason is BatchReason.UNKNOWN
    own.record(4, 1.0)
    own.record(4, 2.0)
    assert own.means[4] == pytest.approx(1.3)


# ------------------------------------------------------------------------------ answers that are kept

EXACT, CODED = Space("m", "exact"), Space("m", "klt2")


def test_answers_are_what_brute_force_finds():
    chance, own, kept = np.random.default_rng(3), SemanticCache(8, 0.9, 16), OrderedDict()
    for step in range(600):
        asked = chance.standard_normal(8) * 10 ** chance.uniform(-3, 3)
        if len(kept) and chance.random() < 0.5:
            asked = list(kept.values())[chance.integers(len(kept))] + 0.1 * chance.standard_normal(8)
        cosines = {name: float(row @ asked / np.linalg.norm(row) / np.linalg.norm(asked)) for name, row in kept.items()}
        best = max(cosines, key=cosines.get, default=None)
        near = best is not None and cosines[best] >= 0.9
        if chance.random() < 0.5:
            assert own.lookup(EXACT, asked, 0.0) == (best if near else None)
            if near:
                kept.move_to_end(best)
        else:
            own.store(EXACT, asked, str(step), 0.0)
            if near:
                del kept[best]
            elif len(kept) == 16:
                kept.popitem(last=False)
            kept[str(step)] = asked
        assert len(own) == len(kept) <= 16


def test_an_answer_over_a_coded_cache_is_never_an_exact_one():
    own, asked = SemanticCache(4, keep=10.0), np.array([1.0, 2, 3, 4])
    own.store(CODED, asked, "coded", 0.0)
    assert own.lookup(EXACT, asked, 0.0) is None
    assert own.lookup(Space("other", "klt2"), asked, 0.0) is None
    assert own.lookup(Space("m", "klt2", ("temperature", 1)), asked, 0.0) is None
    assert own.lookup(CODED, 1e-30 * asked, 9.0) == "coded"
    assert own.lookup(CODED, asked, 10.0) is None
    for nothing in (np.zeros(4), np.full(4, np.nan)):
        own.store(CODED, nothing, "no", 0.0)
        assert own.lookup(CODED, nothing, 0.0) is None
    with refused(UserError, "user.embedding-shape", (5,), (4,)):
        own.lookup(CODED, np.ones(5), 0.0)


def test_the_threshold_is_the_lowest_that_is_precise_enough():
    cosines, same = [0.99, 0.95, 0.9, 0.9, 0.8], [True, True, True, False, True]
    assert threshold_for(cosines, same, 1.0) == 0.95
    assert threshold_for(cosines, same, 0.8) == 0.8
    with refused(UserError, "user.no-threshold"):
        threshold_for([0.9], [False])


def test_an_answer_is_good_for_its_time_and_its_place_is_free_then():
    chance, own = np.random.default_rng(4), SemanticCache(6, 0.99, 2, keep=10.0)
    first, second, third = chance.standard_normal((3, 6))
    own.store(EXACT, first, "first", 0.0)
    own.store(EXACT, second, "second", 5.0)
    assert own.lookup(EXACT, first, 9.999) == "first"  # used last, so it would stay
    assert own.lookup(EXACT, first, 10.0) is None and len(own) == 1
    own.store(EXACT, third, "third", 11.0)
    assert [own.lookup(EXACT, one, 14.0) for one in (first, second, third)] == [None, "second", "third"]
    assert own.lookup(EXACT, third, 21.0) is None and len(own) == 0


@pytest.mark.parametrize(
    ("count", "percent", "rank"), [(1000, 99.9, 999), (1000, 99.0, 990), (10, 90.0, 9), (3, 50.0, 2)]
)
def test_a_percentile_is_of_the_rank_that_it_names(count, percent, rank):
    own = Histogram()
    own.ingest(2.0 ** np.arange(count).clip(max=60) if count <= 60 else np.linspace(1, 9, count))
    exact = (2.0 ** np.arange(count) if count <= 60 else np.linspace(1, 9, count))[rank - 1]
    assert own.percentiles((percent,))[0] == pytest.approx(exact, rel=1 / 64)
