"""Paged memory counted by phase is paged memory counted page by page."""

from __future__ import annotations

import random

import pytest

from kvlab.core.errors import UserError
from kvlab_mechanisms.serving.memory import Memory
from refusals import refused

pytestmark = pytest.mark.full


@pytest.mark.parametrize("seed", range(12))
def test_pages_by_phase_are_pages_by_sequence(seed):
    chance, page = random.Random(seed), random.Random(seed).choice([1, 3, 16])
    memory, lengths, phases = Memory(1_000_000, page), [], []
    for _ in range(200):
        if lengths and chance.random() < 0.3:
            at = chance.randrange(len(lengths))
            memory.give(memory.pages_of(lengths.pop(at)))
            memory.leave(phases.pop(at))
        else:
            tokens = chance.randint(1, 60)
            assert memory.take(memory.pages_of(tokens))
            lengths.append(tokens)
            phases.append(memory.join(tokens))
        steps = chance.randint(0, 40)
        assert memory.steps_left(steps) == steps
        memory.advance(steps)
        lengths = [one + steps for one in lengths]
        assert memory.pages - memory.free == sum(-(-one // page) for one in lengths)


@pytest.mark.parametrize("seed", range(6))
def test_steps_last_until_a_page_is_missing(seed):
    chance = random.Random(seed)
    memory = Memory(40, 16)
    for _ in range(8):
        tokens = chance.randint(1, 48)
        assert memory.take(memory.pages_of(tokens))
        memory.join(tokens)
    steps = memory.steps_left(1000)
    assert memory.needed(steps) <= memory.available < memory.needed(steps + 1)
    with pytest.raises(UserError):
        memory.advance(steps + 1)


def test_a_beginning_stays_until_its_pages_are_needed():
    memory = Memory(10, 16)
    assert memory.take(4)
    assert memory.keep(7, 40) == 2  # the third page is not whole
    assert memory.lookup(7, 40) == 32
    memory.give(2)
    memory.release(7)
    assert (memory.free, memory.available) == (8, 10)
    memory.hold(7)
    assert not memory.take(9)
    memory.release(7)
    assert memory.take(9)
    assert memory.lookup(7, 40) == 0
    with refused(UserError, "user.no-memory", 0, 16):
        Memory(0, 16)
