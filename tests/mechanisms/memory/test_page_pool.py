"""Pages: nobody loses a token, whatever is done to the pool; moves are as few as they can be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlab.core.errors import PagerError, ParamsError, PoolExhausted
from kvlab_mechanisms.memory.page_pool import PagePool
from refusals import refused

pytestmark = pytest.mark.full

TOKENS, LAYERS = 4, (3, 5)


class Machine(RuleBasedStateMachine):
    """A pool beside what each sequence wrote."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(12, TOKENS, LAYERS, wipe=True)
        self.written: dict[int, list[int]] = {}
        self.clock = 0

    def rows(self, layer: int) -> torch.Tensor:
        return self.pool.layer(layer)

    @rule(sequence=st.integers(0, 5), tokens=st.integers(0, 9))
    def extend(self, sequence, tokens):
        held = len(self.written.get(sequence, []))
        tables = {s: (list(t.pages), t.tokens) for s, t in self.pool.tables.items()}
        try:
            self.pool.extend(sequence, tokens)
        except PoolExhausted:
            assert tables == {s: (t.pages, t.tokens) for s, t in self.pool.tables.items()}
            return
        self.written.setdefault(sequence, [])
        for slot in self.pool.slots(sequence)[held:].tolist():
            self.clock += 1
            self.written[sequence].append(self.clock % 251)
            for layer in range(len(LAYERS)):
                self.rows(layer)[slot // TOKENS, slot % TOKENS] = (self.clock % 251) + layer

    @precondition(lambda self: self.written)
    @rule(data=st.data(), twin=st.integers(6, 9))
    def fork(self, data, twin):
        sequence = data.draw(st.sampled_from(sorted(self.written)))
        tokens = data.draw(st.integers(0, len(self.written[sequence])))
        if twin in self.written:
            with pytest.raises(PagerError):
                self.pool.fork(sequence, twin, tokens)
            return
        self.pool.fork(sequence, twin, tokens)
        self.written[twin] = self.written[sequence][:tokens]

    @rule(sequence=st.integers(0, 9), tokens=st.integers(1, 6))
    def extend_twin(self, sequence, tokens):
        if sequence in self.written:
            self.extend(sequence, tokens)

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def release(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.written)))
        self.pool.release(sequence)
        del self.written[sequence]

    @rule(most=st.none() | st.integers(0, 3))
    def defragment(self, most):
        used = self.pool.used
        misplaced = sum(1 for page in held(self.pool) if page >= used)
        moves = self.pool.defragment(most)
        assert len(moves) == (misplaced if most is None else min(most, misplaced))
        if most is None:
            assert self.pool.external == 0
            assert self.pool.reclaimable == (12 - used) * self.pool.data.shape[1]
            assert self.pool.defragment() == []

    @invariant()
    def everybody_reads_what_they_wrote(self):
        for sequence, wrote in self.written.items():
            slots = self.pool.slots(sequence)
            for layer in range(len(LAYERS)):
                rows = self.rows(layer)[slots // TOKENS, slots % TOKENS]
                wanted = torch.tensor(wrote, dtype=torch.uint8)[:, None] + layer
                assert torch.equal(rows, wanted.expand_as(rows))

    @invariant()
    def pages_are_free_or_held(self):
        live = held(self.pool)
        assert sorted([*live, *self.pool.free.stack]) == list(range(12))
        assert self.pool.used == len(live)
        assert all(not self.pool.data[page].any() for page in self.pool.free.stack)

    @invariant()
    def only_twins_share_a_page_and_only_what_they_began_with(self):
        """A page of two sequences holds the same tokens of both; nobody writes into it."""
        for one, mine in self.pool.tables.items():
            assert len(set(mine.pages)) == len(mine.pages) == -(-mine.tokens // TOKENS)
            for other, theirs in self.pool.tables.items():
                for page in set(mine.pages) & set(theirs.pages) if one != other else ():
                    begin = mine.pages.index(page) * TOKENS
                    assert theirs.pages.index(page) * TOKENS == begin
                    alike = min(len(self.written[one]), len(self.written[other]), begin + TOKENS)
                    assert self.written[one][begin:alike] == self.written[other][begin:alike]


def held(pool: PagePool) -> set[int]:
    return {page for table in pool.tables.values() for page in table.pages}


TestPool = Machine.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_a_sequence_fills_its_last_page_first():
    pool = PagePool(4, 4, [1])
    assert pool.extend("a", 3) == [0]
    assert pool.extend("a", 1) == []
    assert pool.extend("a", 5) == [1, 2]
    assert pool.internal == pytest.approx(3 / 12)


def test_the_page_freed_last_is_taken_first():
    pool = PagePool(4, 4, [1])
    pool.extend("a", 4), pool.extend("b", 4)
    pool.release("a")
    assert pool.extend("c", 1) == [0]


def test_external_fragmentation_is_holes_below_the_highest_page():
    pool = PagePool(8, 1, [1])
    for name in "abcdef":
        pool.extend(name, 1)
    pool.release("b"), pool.release("d")
    assert pool.external == pytest.approx(2 / 6)
    assert pool.defragment(1) == [(5, 1)]
    assert pool.external == pytest.approx(1 / 5)
    assert pool.defragment() == [(4, 3)]
    assert (pool.external, pool.reclaimable) == (0, 4)


def test_layers_lie_in_a_page_one_after_the_other():
    pool = PagePool(2, 3, [2, 0, 5])
    assert [list(pool.layer(i).shape) for i in range(3)] == [[2, 3, 2], [2, 3, 0], [2, 3, 5]]
    pool.layer(2)[1] = 7
    assert pool.data.sum() == 7 * 15


@pytest.mark.parametrize("call", [lambda p: p.release("x"), lambda p: p.slots("x"), lambda p: p.fork("x", "y")])
def test_an_unknown_sequence_is_named(call):
    with refused(PagerError, "pager.no-sequence", "'x'"):
        call(PagePool(1, 1, [1]))


def test_sizes_are_whole_numbers():
    with pytest.raises(ParamsError):
        PagePool(0, 1, [1])
    with pytest.raises(ParamsError):
        PagePool(1, 1, [-1])
