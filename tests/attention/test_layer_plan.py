"""Plans of patterns: the threshold rule, the best plan for a budget, and the formulas of cost."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.attention.layer_plan import budgeted, by_length, cost_of, saved
from kvlab.attention.patterns import BlockSparse, ChunkSummary, Full, SlidingWindow
from kvlab.core.errors import UserError
from refusals import refused

FULL, CHOSEN, SUMMED = Full(), BlockSparse(), ChunkSummary()
OFFERED = (FULL, CHOSEN, SlidingWindow(64))


def test_the_rule_changes_at_its_thresholds():
    assert by_length(24, 512) == (FULL,) * 24
    assert by_length(24, 513) == by_length(24, 4096) == (FULL,) * 12 + (CHOSEN,) * 12
    assert by_length(24, 4097) == (FULL, *(CHOSEN,) * 11, *(SUMMED,) * 12)
    assert by_length(24, 10**6) is by_length(24, 10**6)  # looked up
    with refused(UserError, None, "9 and 8", "0 < full <= sparse"):
        by_length(24, 100, full=9, sparse=8)


def test_longer_texts_save_more():
    spared = [saved(by_length(12, tokens), tokens) for tokens in (256, 512, 1024, 2048, 4096, 6000)]
    assert spared == sorted(spared) and spared[0] == 0 and spared[-1] > 0.5


@st.composite
def problems(draw):
    layers = draw(st.integers(1, 8))
    loss = st.floats(0, 1)
    losses = [{FULL: 0.0, CHOSEN: draw(loss), SlidingWindow(64): draw(loss)} for _ in range(layers)]
    costs = {
        FULL: draw(st.integers(5, 50)),
        CHOSEN: draw(st.integers(2, 20)),
        SlidingWindow(64): draw(st.integers(1, 20)),
    }
    least = layers * min(costs.values())
    return losses, costs, draw(st.integers(least, layers * max(costs.values())))


@given(problems())
def test_the_budgeted_plan_is_the_best_of_all(problem):
    losses, costs, budget = problem
    plan = budgeted(losses, costs, budget)
    assert cost_of(plan, costs) <= budget
    lost = [
        sum(layer[p] for layer, p in zip(losses, one, strict=True))
        for one in product(OFFERED, repeat=len(losses))
        if cost_of(one, costs) <= budget
    ]
    assert sum(layer[p] for layer, p in zip(losses, plan, strict=True)) == pytest.approx(min(lost))


def test_a_budget_that_is_too_small_is_refused():
    with refused(UserError, None, "budget of 3", "cost of 4"):
        budgeted([{FULL: 0.0, CHOSEN: 1.0}] * 2, {FULL: 5, CHOSEN: 2}, 3)


def test_costs_are_their_closed_formulas():
    heads, d, tokens = 3, 8, 300
    assert FULL.flops(tokens, heads, d) == 2 * heads * d * tokens * (tokens + 1)
    assert SlidingWindow(64).flops(tokens, heads, d) == 4 * heads * d * sum(min(64, t) for t in range(1, tokens + 1))
    sparse = BlockSparse(block=16, top_k=3, window=16, sinks=0)
    keys = sum(min(t, 16 + 3 * 16) for t in range(1, tokens + 1))
    looked = sum(t // 16 for t in range(tokens))
    assert sparse.flops(tokens, heads, d) == 4 * heads * d * keys + 2 * heads * d * looked
    assert FULL.bytes_read(99, 2, 8) == 100 * 2 * 2 * 8 * 2  # tokens, K and V, heads, numbers, bytes


def test_patterns_say_their_names():
    assert FULL.name == "full" and SlidingWindow(9).name == "window:window=9"
    assert ChunkSummary().name == "chunk_summary:chunk=64,top_k=4,exact=1,sinks=1"
