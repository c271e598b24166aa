"""Exact tokens beside coded pages, held against dense attention in float64 that reads each key as the rule says."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.pages.test_attention import BLOCK, DIM, GROUP, KV, small_spans  # noqa: F401 (short cuts here too)
from kvlab.cache.pages import exact
from kvlab.cache.pages.attention import Keys, attend
from kvlab.cache.pages.exact import ExactStore, attend_beside, kept_exact
from kvlab.cache.pages.step import ServerStep
from kvlab.codecs.hadamard import HadamardStream
from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.core.recipe import Recipe
from refusals import refused, refused_in_one_line

LONGEST, REQUESTS, HEADS = 40, 3, KV * GROUP
SCALE = 0.3


@pytest.fixture(autouse=True, scope="module")
def loops_elsewhere():
    """Compiled loops are for the process of `compiled_cases.py` alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "compiled", lambda: "numba" in sys.modules)
        yield


def scheduled(new=(), resumed=(), running=(), finished=(), preempted=(), counts=None) -> SimpleNamespace:
    """What is read of vLLM's `SchedulerOutput`; `new`, `resumed` and `running` are names and computed tokens."""
    cached = [*running, *resumed]
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=computed) for name, computed in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in cached],
            resumed_req_ids={name for name, _ in resumed},
            num_computed_tokens=[computed for _, computed in cached],
        ),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
        num_scheduled_tokens=counts or {},
    )


class Request:
    """A sequence with the tokens of a layer, what its pages read, and how many tokens have been computed."""

    def __init__(self, name: str, row: int, taken: int, length: int, seed: int):
        source = torch.Generator().manual_seed(seed)
        self.name, self.taken, self.done, self.length = name, taken, taken, length
        self.k, self.v, self.coded_k, self.coded_v = torch.randn(4, LONGEST, KV, DIM, generator=source)
        self.q = torch.randn(LONGEST, HEADS, DIM, generator=source)
        self.blocks = torch.arange(LONGEST // BLOCK) + row * LONGEST // BLOCK

    def due(self, p: int, sink: int, recent: int) -> torch.Tensor:
        """Attention of the query at p, dense and in float64."""
        t = torch.arange(p + 1)
        as_it_was = (t >= self.taken) & ((t < (0 if self.taken else sink)) | (p - t < recent))
        k, v = (
            torch.where(as_it_was[:, None, None], own[: p + 1], coded[: p + 1]).double().repeat_interleave(GROUP, 1)
            for own, coded in ((self.k, self.coded_k), (self.v, self.coded_v))
        )
        weights = (torch.einsum("hd,khd->hk", self.q[p].double(), k) * SCALE).softmax(-1)
        return torch.einsum("hk,khd->hd", weights, v)


class Server:
    """Requests that run together, one layer of them, and its exact tokens."""

    def __init__(self, sink: int, recent: int, dtype: torch.dtype = torch.float32):
        self.store = ExactStore(sink, recent, REQUESTS, 1, KV, DIM, dtype)
        self.pages = torch.zeros(2, KV, REQUESTS * LONGEST, DIM)
        self.tolerance = 1e-5

    def step(self, running: list[tuple[Request, int]]) -> ServerStep:
        """Compute so many further tokens of each request, and hold every answer against what is due."""
        starts = [0, *torch.tensor([count for _, count in running]).cumsum(0).tolist()]
        lengths = [one.done + count for one, count in running]
        step = ServerStep.of(starts, lengths, torch.stack([one.blocks for one, _ in running]), BLOCK)
        step = self.store.beside(step, [one.name for one, _ in running])
        new = [slice(one.done, one.done + count) for one, count in running]
        query, key, value, coded_k, coded_v = (
            torch.cat([getattr(one, name)[own] for (one, _), own in zip(running, new, strict=True)])
            for name in ("q", "k", "v", "coded_k", "coded_v")
        )
        slots = step.own_slots()
        self.pages[0][:, slots], self.pages[1][:, slots] = (
            coded_k.transpose(0, 1).float(),
            coded_v.transpose(0, 1).float(),
        )
        seen = []

        def read(slots, positions):
            seen.append(len(slots))
            return Keys(self.pages[0][:, slots], self.pages[1][:, slots])

        coded = attend(query, read, step, SCALE)
        values = self.store.values[0]
        got = attend_beside(coded, query, key, value, values, step, SCALE)
        due = torch.stack(
            [
                one.due(p, self.store.sink, self.store.recent)
                for one, count in running
                for p in range(one.done, one.done + count)
            ]
        )
        torch.testing.assert_close(got.double(), due, atol=self.tolerance, rtol=self.tolerance)
        assert sum(seen) == step.coded()
        counts = {one.name: count for one, count in running}
        told = scheduled(running=[(one.name, one.done) for one, _ in running], counts=counts)
        assert self.store.coded(told) == step.coded()
        for one, count in running:
            one.done += count
        return step


@st.composite
def lives(draw):
    """Requests with what they take from the prefix cache, and how the rest is cut into steps."""
    found = []
    for _ in range(draw(st.integers(1, REQUESTS))):
        taken = draw(st.sampled_from((0, 0, BLOCK, 2 * BLOCK)))
        cuts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
        while taken + sum(cuts) > LONGEST:
            cuts.pop()
        found.append((taken, cuts))
    return found


@given(lives(), st.sampled_from((0, 1, 3, 4)), st.sampled_from((0, 1, 2, 5, 16, 64)), st.integers(0, 3))
def test_every_query_reads_each_key_as_its_position_says(asked, sink, recent, seed):
    """Prompts cut anywhere, single tokens, requests beside each other and that skip a step, prefixes taken over."""
    if not sink + recent:
        return
    server, requests = Server(sink, recent), []
    for number, (taken, cuts) in enumerate(asked):
        one = Request(f"{number}", number, taken, sum(cuts), seed + number)
        slots = torch.arange(taken) + number * LONGEST  # coded by whoever computed the prefix
        server.pages[0][:, slots], server.pages[1][:, slots] = (
            one.coded_k[:taken].transpose(0, 1),
            one.coded_v[:taken].transpose(0, 1),
        )
        requests.append((one, cuts))
    server.store.follow(scheduled(new=[(one.name, one.taken) for one, _ in requests]))
    for at in range(8):
        running = [(one, cuts[at]) for one, cuts in requests if at < len(cuts) and cuts[at]]
        if running:
            server.step(running)


def test_as_many_recent_tokens_as_there_are_make_it_plain_attention_and_read_no_page():
    server, one = Server(0, 64), Request("a", 0, 0, 30, 0)
    server.store.follow(scheduled(new=[("a", 0)]))
    assert [server.step([(one, count)]).coded() for count in (7, 1, 1, 12, 1)] == [0] * 5


@pytest.mark.parametrize("counts", [(4, 1), (1, 3, 1, 7)])
def test_sinks_alone_after_a_prefix_that_was_taken_over_leave_nothing_exact(counts):
    """The last of four queries is alone in its part, and has no key there: the kernel is not asked about none."""
    server, one = Server(2, 0), Request("a", 0, BLOCK, 30, 0)
    slots = torch.arange(BLOCK)
    server.pages[0][:, slots], server.pages[1][:, slots] = (
        one.coded_k[:BLOCK].transpose(0, 1),
        one.coded_v[:BLOCK].transpose(0, 1),
    )
    server.store.follow(scheduled(new=[("a", BLOCK)]))
    for count in counts:
        server.step([(one, count)])


def test_the_dtype_of_the_model_is_kept_and_sums_are_in_float32():
    server, one = Server(2, 8, torch.bfloat16), Request("a", 0, 0, 30, 0)
    for name in ("q", "k", "v", "coded_k", "coded_v"):
        setattr(one, name, getattr(one, name).bfloat16())
    server.tolerance = 0.02
    server.store.follow(scheduled(new=[("a", 0)]))
    for count in (7, 1, 1, 12, 1):
        server.step([(one, count)])


def test_a_place_goes_from_who_left_to_who_comes():
    """Finished, cancelled and preempted requests give theirs back; one that waits for a step keeps its own."""
    store = ExactStore(1, 2, 2, 1, KV, DIM, torch.float32)
    store.follow(scheduled(new=[("a", 0), ("b", 0)]))
    store.follow(scheduled(running=[("a", 5)]))
    with refused(CodecNotActive, "not-active.exact-tokens", "request c", "2 requests"):
        store.follow(scheduled(new=[("c", 0)]))
    store.follow(scheduled(new=[("c", 8)], preempted=["a"], finished=["never-ran"]))
    step = ServerStep.of([0, 3, 4], [11, 6], torch.arange(6).view(2, 3), BLOCK)
    assert store.beside(step, ["c", "b"]).first == (0, 1)
    with refused(CodecNotActive, "not-active.exact-tokens", "a was not admitted"):
        store.beside(step, ["c", "a"])
    store.follow(scheduled(resumed=[("a", 4)], finished=["b"]))
    assert store.beside(step, ["c", "a"]).first == (0, 0)
    store.follow(scheduled(new=[("c", 0)], finished=["c"]))  # a name that is given anew
    assert store.beside(step, ["c", "a"]).first == (1, 0)
    store.follow(scheduled(resumed=[("a", 0)], preempted=["a"]))  # in one step
    assert store.beside(step, ["c", "a"]).first == (1, 1)


def test_bytes_are_those_of_all_layers_and_requests():
    store = ExactStore(4, 128, 3, 5, 2, 8, torch.bfloat16)
    assert store.bytes_per_request == 2 * 5 * 132 * 2 * 8 * 2 and store.nbytes == 3 * store.bytes_per_request
    assert store.values.nbytes == store.nbytes and store.values.dtype == torch.bfloat16


def recipe(k: dict, v: dict) -> Recipe:
    return Recipe(k=HadamardStream(bits=4, **k), v=HadamardStream(bits=4, **v))


@pytest.mark.parametrize(
    ("k", "v", "data"),
    [
        ({"recent": 128}, {"recent": 64}, "stream v has sink 0, recent 64"),
        ({"sink": 4}, {}, "stream k has sink 4, recent 0"),
        ({"recent": 513}, {"recent": 513}, "recent of stream k is 513; allowed in coded pages: 0 to 512"),
        ({"sink": 17}, {"sink": 17}, "sink of stream k is 17; allowed in coded pages: 0 to 16"),
        ({"ragged": "exact"}, {"ragged": "exact"}, "ragged: exact"),
    ],
)
def test_what_pages_cannot_keep_exact_is_refused(k, v, data):
    with refused_in_one_line(CapabilityError, "capability.ends", "r.json", data):
        kept_exact(recipe(k, v), "r.json")


def test_the_most_that_pages_keep_exact_is_taken():
    most = {"sink": 16, "recent": 512}
    assert kept_exact(recipe(most, most), "r.json") == (16, 512)
