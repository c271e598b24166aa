"""Rows of `kvlab_mechanisms.serving`: what a service predicts, decides and counts."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import torch

from kvlab.gate.check import Claim
from kvlab_mechanisms.memory.host_tier import HostTier
from kvlab_mechanisms.micro.row import BenchRow, hold, named
from kvlab_mechanisms.serving.policies.batches import Batches
from kvlab_mechanisms.serving.policies.canary import Canary
from kvlab_mechanisms.serving.policies.gateway import Gateway
from kvlab_mechanisms.serving.policies.preempt import Switch
from kvlab_mechanisms.serving.policies.profiler import Histogram
from kvlab_mechanisms.serving.policies.ratelimit import NANO, RateLimit
from kvlab_mechanisms.serving.policies.semantic import SemanticCache, Space
from kvlab_mechanisms.serving.predictor import REQUEST, Online, fit, request_features
from kvlab_mechanisms.serving.worker import Costs

SPACE = Space("a" * 16, "exact")
COSTS = Costs(step=0.02, prefill=2e-4, pair=1e-7, decode=1e-3, read=1e-7)


def rows() -> Iterator[BenchRow]:
    """All of them."""
    yield from predictions()
    yield from preemptions()
    for workers in (8, 1024):
        yield from gateways(workers, "" if workers == 8 else f"-{workers}")
    yield from canaries()
    yield from profiles()
    yield from batches()
    for entries in (64, 100_000):
        yield from answers(entries, "" if entries == 64 else f"-{entries}")
    yield from limits()


# ---------------------------------------------------------------------------------------------- predicts


def question(prompt: int, output: int) -> tuple[float, ...]:
    """The row of a request alone, of 1,000 bytes a token; see `request_features`."""
    return 1.0, prompt, prompt * prompt, output, output * (prompt + output / 2) * 1e3, 0.0


def predictions() -> Iterator[BenchRow]:
    """A request's seconds, of a fit on 40 rows; and one more row for a fit that follows."""
    chance = np.random.default_rng(0)
    prompt, output, beside = (chance.integers(1, 900, 60).astype(float) for _ in range(3))
    features = request_features(prompt, output, beside, 1e3)
    true = np.array([0.01, 1e-4, 1e-8, 0.02, 1e-9, 1e-3])
    fitted, online = fit(features, features @ true, REQUEST), Online(REQUEST)
    known = fitted.coefficients
    kept: deque[tuple] = deque(maxlen=1000)

    def plain() -> float:
        return float(np.array(question(100, 10)) @ known)

    def check() -> None:
        found = fitted.predict(question(100, 10))
        hold(math.isclose(found.value, float(np.array(question(100, 10)) @ true), rel_tol=1e-6) and found.determined)

    yield BenchRow(
        "r24", "a prompt of 100 tokens, 10 to answer; 6 coefficients", check, lambda: fitted.predict(question(100, 10)),
        plain, "numpy, a product", "ours with an interval, and whether the data determines it; the original: two terms",
    )  # fmt: skip

    def follows() -> None:
        own = Online(REQUEST, forgetting=1.0)
        for row in features:
            own.record(row, float(row @ true))
        hold(np.allclose(own.coefficients(), true, rtol=1e-3))

    row = features[0]
    yield BenchRow(
        "r25", "a row of 6 numbers", follows, lambda: online.record(row, 0.1), lambda: kept.append((row, 0.1)), "deque",
        "loses: 36 sums are updated, so that memory stays and nothing is fitted anew; the original's list grows",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- decides


def preemptions() -> Iterator[BenchRow]:
    """A sequence of 128 KiB goes to the host and comes back; and one whose cache is made anew."""
    page = torch.randn(4, 2, 4, 32, 32)
    tier, out, back = HostTier(1 << 24), torch.empty_like(page), torch.empty_like(page)
    switch = Switch(COSTS, chunk=512, token_bytes=2048, bandwidth=1e9)
    dear = Switch(COSTS, chunk=512, token_bytes=1 << 30, bandwidth=1e9)

    def swapped() -> torch.Tensor | None:
        return tier.fetch("a") if switch(64) is not None and not tier.offload("a", page) else None

    def copied() -> None:
        out.copy_(page)
        back.copy_(out)

    def check() -> None:
        hold(torch.equal(swapped(), page) and dear(64) is None)

    yield BenchRow(
        "r44", "128 KiB out and back, with the decision", check, swapped, copied, "torch copy_ twice",
        "the original copies once and hands back what it kept, so that nothing comes back to the device",
    )  # fmt: skip
    yield BenchRow(
        "r45", "the decision that recomputing is cheaper", check, lambda: dear(64), None,
        "none: vLLM recomputes always, and decides nothing",
        "both ways are priced; the original reads a flag",
    )  # fmt: skip


def gateways(workers: int, name: str) -> Iterator[BenchRow]:
    """A request is given to the least loaded worker, and done."""
    gateway, load = Gateway("least"), [0] * workers
    for worker in range(workers):
        gateway.register(worker, 16)

    def routed() -> None:
        gateway.complete(gateway.route())

    def scan() -> None:
        best = load.index(min(load))
        load[best] += 1
        load[best] -= 1

    def check() -> None:
        own = Gateway("least")
        for worker in range(workers):
            own.register(worker, 16)
        found = [own.route() for _ in range(3 * workers)]
        hold(max(own.load.values()) == min(own.load.values()) == 3 and len({*found[:workers]}) == workers)

    shape = f"{workers} workers of 16, one request"
    told = "ours holds capacity, health, failures and versions" + ("; its heap is for many workers" if not name else "")
    yield BenchRow(f"r46{name}", shape, check, routed, scan, "a scan of a list", told)
    if not name:
        yield BenchRow("r47", shape + "; the original's best", check, routed, scan, "a scan of a list", told)


def canaries() -> Iterator[BenchRow]:
    """Whether a key is the canary's."""
    canary = Canary(0.1)
    claim = Claim.model_construct(word="pass", earned="supported", findings=(), failed_criteria=())
    for name in ("old", "new"):
        canary.register(name, claim)
    canary.begin("old")
    canary.stage("new")

    def check() -> None:
        names = [canary.route(key) for key in range(20_000)]
        hold(0.09 < names.count("new") / len(names) < 0.11 and names == [canary.route(key) for key in range(20_000)])

    told = "ours by a hash of the key, so that who asks again is served by the same; the original draws"
    for row, shape in (("r48", "a tenth of the keys"), ("r49", "a tenth of the keys; the original's best")):
        yield BenchRow(
            row, shape, check, lambda: canary.route(12345), lambda: random.random() < 0.1, "random.random", told
        )


def batches() -> Iterator[BenchRow]:
    """How many sequences at once, with 64 that wait; and one observation."""
    ours, means = Batches("throughput"), {8: 0.02}

    def check() -> None:
        own = Batches("latency", target=0.1)
        for size in (1, 8, 16, 32):
            own.record(size, 0.01 * size)
        hold(ours.next(64).size == 32 and own.next(64).size == 10)

    def smoothed() -> None:
        means[8] += 0.3 * (0.02 - means[8])

    yield BenchRow(
        "r52", "64 wait, at most 32, all that fit", check, lambda: ours.next(64), lambda: min(64, 32),
        "a clamp, as vLLM's max_num_seqs is",
        "ours says what decided it and what it expects; an empty call's time is taken out of both",
    )  # fmt: skip
    yield BenchRow(
        "r53", "a step of 8 sequences", check, lambda: ours.record(8, 0.02), smoothed, "a dict and one product",
        "ours moves the guess for sizes that were never seen, too",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- counts


def profiles() -> Iterator[BenchRow]:
    """A duration counted; percentiles of 1,000."""
    ours, full = Histogram(), Histogram()
    full.ingest([5.0] * 1000)
    chance = np.random.default_rng(0).lognormal(-4, 1, 1000)

    def check() -> None:
        own = Histogram()
        for value in chance.tolist():
            own.record(value)
        ranks = np.sort(chance)[[499, 899, 989, 998]]
        hold(np.allclose(own.percentiles(), ranks, rtol=1 / 64) and full.percentiles() == [5.0] * 4)

    record, read, rival = counting()
    yield BenchRow(
        "r50", "one duration", check, lambda: ours.record(0.02), record, rival,
        "a bare deque, which the original has, takes less, and grows until it forgets",
    )  # fmt: skip
    yield BenchRow("r51", "1,000 durations, all 5", check, full.percentiles, read, rival, "4 percentiles to 1/64")


def counting() -> tuple[Callable, Callable, str]:
    """The same by HdrHistogram, else by a deque that numpy sorts."""
    if rival := named("hdrh", "hdrhistogram"):
        from hdrh.histogram import HdrHistogram

        found, full = (HdrHistogram(1, 3_600_000_000, 2) for _ in range(2))
        for _ in range(1000):
            full.record_value(5_000_000)
        percents = [50.0, 90.0, 99.0, 99.9]
        return lambda: found.record_value(20_000), lambda: full.get_percentile_to_value_dict(percents), rival
    kept, full = deque(maxlen=1000), [5.0] * 1000
    return lambda: kept.append(0.02), lambda: np.percentile(full, [50, 90, 99, 99.9]), "deque, numpy percentile"


def answers(entries: int, name: str) -> Iterator[BenchRow]:
    """A question that is not known, and one that is kept."""
    chance = np.random.default_rng(0)
    known = chance.standard_normal((entries, 128)).astype(np.float32)
    query = chance.standard_normal(128).astype(np.float32)
    cache = filled(known)
    lookup, add, rival = nearest(known, query)

    def check() -> None:
        hold(cache.lookup(SPACE, known[7] * 3, 0.0) == "7" and cache.lookup(SPACE, query, 0.0) is None)
        hold(cache.lookup(Space("a" * 16, "klt2"), known[7], 0.0) is None)

    shape = f"{entries:,} answers, 128 numbers each"
    yield BenchRow(
        f"r56{name}", shape, check, lambda: cache.lookup(SPACE, query, 0.0), lookup, rival,
        "ours refuses what has no direction, and skips what has run out",
    )  # fmt: skip
    if not name:
        yield BenchRow(
            "r57", shape + ", the same one again", check, lambda: cache.store(SPACE, known[7], "7", 0.0), add, rival,
            "loses: ours looks for a question that is nearly the same first, and replaces its answer; the original and"
            " the rival keep both",
        )  # fmt: skip


def filled(known: np.ndarray) -> SemanticCache:
    """A cache of these directions, each of which has its number for an answer; stored at once."""
    cache = SemanticCache(known.shape[1], capacity=len(known))
    cache.store(SPACE, known[0], "0", 0.0)
    kept = cache.spaces[SPACE]
    kept.rows[:] = known / np.linalg.norm(known, axis=1, keepdims=True)
    kept.used[:], kept.until[:] = np.arange(len(known)), np.inf
    kept.answers[:] = map(str, range(len(known)))
    return cache


def nearest(known: np.ndarray, query: np.ndarray) -> tuple[Callable, Callable, str]:
    """The same by faiss, else by numpy alone."""
    unit = known / np.linalg.norm(known, axis=1, keepdims=True)
    one = query[None] / np.linalg.norm(query)
    if rival := named("faiss", "faiss-cpu"):
        import faiss

        faiss.omp_set_num_threads(1)
        index, grown = faiss.IndexFlatIP(128), faiss.IndexFlatIP(128)
        index.add(unit)
        return lambda: index.search(one, 1), lambda: (grown.reset(), grown.add(unit[:1])), f"{rival} IndexFlatIP"
    rows = unit.copy()
    return lambda: int((rows @ one[0]).argmax()), lambda: rows.__setitem__(7, unit[7]), "numpy, a product"


def limits() -> Iterator[BenchRow]:
    """A tenant asks for a token, of 8 that are known; and what it could have."""
    ours, clock = RateLimit(10, 100), [0]
    for tenant in range(8):
        ours.consume(f"tenant-{tenant}", 1, 0)

    def consumed() -> bool:
        clock[0] += NANO // 1000
        return ours.consume("tenant-0", 1, clock[0]).allowed

    def check() -> None:
        own, times = RateLimit(10, 100), random.Random(0)
        granted = sum(own.consume("a", 1, times.randrange(NANO * 100)).allowed for _ in range(5000))
        hold(100 <= granted <= 100 + 10 * 100)

    ask, read, rival = limiting()
    told = "time moves by a millisecond a call, so that 99 in 100 are refused; the original's clock refuses 88"
    yield BenchRow("r58", "10 a second, 100 at once", check, consumed, ask, rival, told)
    told = "of one tenant among many, in whole numbers; two floats beside take less"
    yield BenchRow(
        "r59", "10 a second, 100 at once", check, lambda: ours.tokens("tenant-0", clock[0]), read, rival, told
    )


def limiting() -> tuple[Callable, Callable, str]:
    """The same by `limits`, else by a bucket of two floats."""
    if (rival := named("limits", "limits")) and find_spec("deprecated"):
        from limits import parse
        from limits.storage import MemoryStorage
        from limits.strategies import SlidingWindowCounterRateLimiter

        limiter, item = SlidingWindowCounterRateLimiter(MemoryStorage()), parse("10/second")
        return (
            lambda: limiter.hit(item, "tenant-0"),
            lambda: limiter.get_window_stats(item, "tenant-0"),
            f"{rival}, a sliding window",
        )
    state = [100.0, 0.0]

    def ask() -> bool:
        state[1] += 0.001
        state[0] = min(100.0, state[0] + 0.01)
        allowed = state[0] >= 1
        state[0] -= allowed
        return allowed

    return ask, lambda: min(100.0, state[0] + 0.01), "a bucket of two floats"
