import numpy as np
import pytest

from kvlab.core.errors import Fault
from kvlab.stats.shapley import corner_index, interactions, pairs, shapley
from refusals import refused


def high_levels(k):
    return (np.arange(1 << k)[:, None] >> np.arange(k)) & 1


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_parts_sum_to_the_gap(k):
    corners = np.random.default_rng(k).normal(size=(50, 1 << k))
    assert np.allclose(shapley(corners).sum(-1), corners[:, -1] - corners[:, 0], rtol=0, atol=1e-13)


def test_additive_effects_are_recovered_exactly():
    effects = np.array([0.5, -0.25, 2.0])
    corners = 1.0 + high_levels(3) @ effects
    assert shapley(corners) == pytest.approx(effects, abs=1e-15)
    assert interactions(corners) == pytest.approx(np.zeros(3), abs=1e-15)


def test_a_pair_is_shared_equally_and_found():
    levels = high_levels(3)
    corners = levels @ np.array([1.0, 2.0, 3.0]) + 0.6 * levels[:, 0] * levels[:, 2]
    assert shapley(corners) == pytest.approx([1.3, 2.0, 3.3])
    found = dict(zip(pairs(3), interactions(corners), strict=True))
    assert found == pytest.approx({(0, 1): 0, (0, 2): 0.6, (1, 2): 0})


def test_a_triple_by_hand():
    """v = 1 only when all three are high: each has 1/3, each pair 1/2 (Grabisch & Roubens)."""
    corners = np.zeros(8)
    corners[7] = 1
    assert shapley(corners) == pytest.approx([1 / 3] * 3)
    assert interactions(corners) == pytest.approx([1 / 2] * 3)


def test_against_the_average_over_orders():
    from itertools import permutations

    corners = np.random.default_rng(0).normal(size=8)
    expected = np.zeros(3)
    for order in permutations(range(3)):
        at = 0
        for factor in order:
            expected[factor] += (corners[at | 1 << factor] - corners[at]) / 6
            at |= 1 << factor
    assert shapley(corners) == pytest.approx(expected)


def test_corner_index_and_sizes():
    assert corner_index((False, True, True)) == 6
    assert shapley(np.array([4.0])).shape == (0,)
    with refused(Fault, "fault.corners", 6):
        shapley(np.zeros(6))
