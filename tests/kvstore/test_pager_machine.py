"""Any schedule of calls, refused ones among them, keeps every invariant and every bit."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvlab.core.errors import PagerError, PinRefused, PoolExhausted
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import Geometry, same_bits
from kvlab.kvstore.paging.pager import Pager
from kvlab.kvstore.paging.residency import MAKERS, build
from kvstore.paging import holds, random_bits, saved, state, write
from tiers import number

STEPS = 20  # of a schedule, on average over all of them
GEOMETRY = Geometry(layers=2, kv_heads=1, head_dim=2, dtype="bfloat16", chunk_tokens=4)
SCORES = st.lists(st.one_of(st.none(), st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0])), max_size=12)
ANY = st.integers(min_value=0, max_value=10**6)


class PagerMachine(RuleBasedStateMachine):
    """A pager beside the rows that it should hold."""

    steps: ClassVar[int] = 0

    @initialize(
        sinks=st.integers(0, 2),
        tail=st.integers(0, 3),
        more=st.integers(0, 4),
        policy=st.sampled_from(list(MAKERS)),
        seed=ANY,
    )
    def begin(self, sinks, tail, more, policy, seed):
        self.config = PagerConfig((sinks + tail + 2 + more) * 4, 4, sinks, tail)
        self.policy, self.seed = build(policy, GEOMETRY, seed), seed
        self.rows = random_bits(GEOMETRY, 0)
        self.pager = Pager(GEOMETRY, self.config, self.policy, block_order=self.order())
        self.seen = self.pager.epoch, self.pager.resident

    def order(self) -> list[int]:
        return random.Random(self.seed).sample(range(self.config.blocks), self.config.blocks)

    def refused(self, error, call) -> None:
        before = state(self.pager)
        with pytest.raises(error):
            call()
        assert state(self.pager) == before

    def append(self, n: int) -> None:
        self.pager.alloc_span(self.pager.length, n)
        self.seed += 1
        self.rows = torch.cat([self.rows, random_bits(GEOMETRY, n, self.seed)], dim=3)

    @rule(n=ANY)
    @precondition(lambda self: self.pager.room > 0)
    def alloc(self, n):
        self.append(1 + n % self.pager.room)

    @rule(n=st.integers(1, 9))
    def alloc_and_write(self, n):
        if n <= self.pager.room:
            self.append(n)
        write(self.pager, self.rows)

    @rule(n=st.integers(1, 1000))
    def alloc_too_much(self, n):
        self.refused(PoolExhausted, lambda: self.pager.alloc_span(self.pager.length, self.pager.room + n))

    @rule(layer=st.integers(0, 1), n=st.integers(1, 9))
    def write_a_few_rows(self, layer, n):
        start = self.pager._written[layer]
        end = min(start + n, self.pager.length)
        self.pager.write(layer, start, *self.rows[layer, :, :, start:end])

    @rule()
    def write_all(self):
        write(self.pager, self.rows)
        assert self.pager.room > 0

    @rule(chunk=ANY)
    @precondition(lambda self: self.pager.length)
    def page_out(self, chunk):
        chunk %= len(self.pager.chunks)
        if chunk in self.pager.resident and self.pager.protection(chunk):
            self.refused(PagerError, lambda: self.pager.page_out(chunk))
        else:
            self.pager.page_out(chunk)
            assert chunk not in self.pager.resident

    @rule(chunk=ANY)
    @precondition(lambda self: self.pager.length)
    def page_in(self, chunk):
        chunk %= len(self.pager.chunks)
        loose = [number for number in self.pager.resident if not self.pager.protection(number)]
        if chunk in self.pager.resident or loose or self.pager.chunks.pool.free:
            self.pager.page_in(chunk)
            assert chunk in self.pager.resident
        else:
            self.refused(PoolExhausted, lambda: self.pager.page_in(chunk))

    @rule(scores=SCORES)
    def score(self, scores):
        self.pager.set_scores(scores[: len(self.pager.chunks)])

    @rule()
    def reselect(self):
        self.pager.reselect()
        assert len(self.pager.resident) == min(self.config.blocks, len(self.pager.chunks))
        assert len(self.pager.reselect()) == 0

    @rule(lo=st.integers(0, 80), n=st.integers(-3, 14))
    def pin(self, lo, n):
        before, pins = state(self.pager), self.pager.pins
        try:
            self.pager.pin(lo, max(0, lo + n))
        except PinRefused:
            assert state(self.pager) == before
        else:
            assert self.pager.pins == pins | {position // 4 for position in range(lo, lo + n)}

    @rule(lo=st.integers(0, 80))
    def pin_too_much(self, lo):
        most = (self.config.blocks + 1) * 4
        self.refused(PinRefused, lambda: self.pager.pin(lo, lo + most))

    @rule()
    def unpin(self):
        self.pager.unpin_all()

    @rule(more=st.integers(-2, 3), upto=ANY)
    def save_and_load(self, more, upto):
        """Into a pool of another size, of all sealed chunks or of the first ones."""
        payloads, ledger, length = saved(self.pager)
        least = self.config.floor_tokens // 4
        blocks = max(least, self.config.blocks + more)
        kept = len(payloads) - upto % 3 if len(payloads) > 3 else len(payloads)
        self.config = PagerConfig(blocks * 4, 4, self.config.sink_chunks, self.config.tail_chunks)
        same = blocks >= len(ledger.resident) and kept == len(payloads)
        self.pager = Pager.restored(
            GEOMETRY, self.config, self.policy, payloads[:kept], ledger, kept * 4, block_order=self.order()
        )
        self.rows = self.rows[:, :, :, : self.pager.length]
        again = saved(self.pager)
        assert all(same_bits(a, b) for a, b in zip(payloads, again[0], strict=False)) and len(again[0]) == kept
        if same:
            assert again[1:] == (ledger, length)
        self.seen = self.pager.epoch, self.pager.resident

    @invariant()
    def nothing_is_broken(self):
        assert self.pager.check() == []
        assert holds(self.pager, self.rows)
        type(self).steps += 1

    @invariant()
    def blocks_are_free_or_held_once(self):
        held = [self.pager.chunks[chunk].block for chunk in self.pager.resident]
        assert sorted(held + self.pager.chunks.pool.free) == list(range(self.config.blocks))

    @invariant()
    def sinks_tail_and_pins_are_resident(self):
        chunks = range(len(self.pager.chunks))
        tail = [chunk for chunk in chunks if chunk >= len(chunks) - 1 - self.config.tail_chunks]
        pins = [chunk for chunk in chunks if chunk in self.pager.pins]
        assert {*chunks[: self.config.sink_chunks], *tail, *pins} <= set(self.pager.resident)

    @invariant()
    def the_epoch_tells_of_every_change(self):
        epoch, resident = self.seen
        assert self.pager.epoch >= epoch and (self.pager.epoch > epoch or self.pager.resident == resident)
        self.seen = self.pager.epoch, self.pager.resident


@pytest.mark.hypothesis
def test_any_schedule_keeps_the_invariants():
    PagerMachine.steps = 0
    run_state_machine_as_test(
        PagerMachine,
        settings=settings(
            max_examples=number(100),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert PagerMachine.steps >= STEPS * number(100)
