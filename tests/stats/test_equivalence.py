"""The equivalence test: never passed by a true difference, never passed more easily with less data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import Fault
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.equivalence import all_of, below_one, windows_below_one, windows_within, within
from kvlab.stats.power import windows_for_sign
from refusals import refused

MARGIN = 0.02
BOOT = Bootstrap(400, 0.95, 0)
STATES = ("differ", "open", "equivalent")


def around(value: float, half: float, windows: int = 32) -> Estimate:
    return Estimate(value, value - half, value + half, windows, windows, "bca")


def relative(rng, windows: int, apart: float, scatter: float) -> Estimate:
    """The relative difference of an engine that costs `apart` more and whose windows scatter beside the other's."""
    ours = np.exp(0.5 * rng.standard_normal(windows))
    theirs = ours * (1 + apart) * np.exp(scatter * rng.standard_normal(windows) - scatter**2 / 2)
    numbers = np.arange(windows)
    columns = [Column.of(numbers, np.zeros_like(numbers), values) for values in (ours, theirs)]
    return BOOT.combine(columns, lambda m: m[..., 1] / m[..., 0] - 1)


def test_the_whole_interval_decides():
    assert within(around(0.0, 0.019), MARGIN) == "equivalent"
    assert within(around(0.0, 0.02), MARGIN) == "open"  # an end on the margin is not inside
    assert within(around(0.015, 0.01), MARGIN) == "open"
    assert within(around(0.03, 0.01), MARGIN) == "open"  # nor outside
    assert within(around(0.035, 0.01), MARGIN) == within(around(-0.035, 0.01), MARGIN) == "differ"
    with refused(Fault, "fault.margin", 0.0):
        within(around(0, 1), 0.0)


@pytest.mark.parametrize("ends", [(-MARGIN, 0.01), (-0.01, MARGIN), (MARGIN, 0.04), (-0.04, -MARGIN)])
def test_either_end_on_the_margin_leaves_it_open(ends):
    assert within(Estimate(sum(ends) / 2, *ends, 32, 32, "bca"), MARGIN) == "open"


def test_one_bound_is_enough_and_both_must_be_exceeded():
    low, high, wide = around(-2, 1), around(2, 1), around(0.5, 1)
    assert below_one([low, high]) == below_one([wide, low]) == "equivalent"
    assert below_one([high, high]) == "differ"
    assert below_one([high, wide]) == below_one([wide, wide]) == "open"


def test_the_weakest_of_several_tests_decides():
    assert all_of(["equivalent", "equivalent"]) == "equivalent"
    assert all_of(["equivalent", "open"]) == "open"
    assert all_of(["open", "differ", "equivalent"]) == "differ"


@given(value=st.floats(-0.1, 0.1), half=st.floats(1e-4, 0.2), wider=st.floats(1.0, 100.0))
def test_less_data_never_passes_more_easily(value, half, wider):
    """The same finding on fewer windows has a wider interval: it can only become open."""
    first, fewer = (within(around(value, h), MARGIN) for h in (half, half * wider))
    assert fewer in (first, "open")
    sides = [below_one([around(value, h), around(value + 0.01, h)]) for h in (half, half * wider)]
    assert sides[1] in (sides[0], "open")


def test_equal_engines_pass_with_enough_data_and_are_open_with_little():
    rng, passed = np.random.default_rng(0), {}
    for windows in (4, 8, 32, 128, 512):
        found = [within(relative(rng, windows, 0.0, 0.08), MARGIN) for _ in range(60)]
        passed[windows] = found.count("equivalent") / len(found)
        assert found.count("differ") <= 6
    assert list(passed.values()) == sorted(passed.values())
    assert passed[4] <= 0.05 and passed[512] == 1


@pytest.mark.parametrize("windows", [4, 16, 64, 256])
@pytest.mark.parametrize("apart", [0.05, -0.05])
def test_a_true_difference_is_never_equivalent(windows, apart):
    rng = np.random.default_rng(windows)
    found = [within(relative(rng, windows, apart, 0.08), MARGIN) for _ in range(100)]
    assert found.count("equivalent") == 0
    assert windows < 256 or found.count("differ") > 90


def test_a_difference_on_the_margin_passes_no_more_often_than_the_level():
    rng = np.random.default_rng(1)
    found = [within(relative(rng, 64, MARGIN, 0.05), MARGIN) for _ in range(400)]
    assert found.count("equivalent") / len(found) < 0.05  # 2.5 % nominal


@pytest.mark.parametrize("value", [0.0, 0.008, -0.008])
def test_windows_within_have_the_power_that_they_promise(value):
    """Planted: windows of known scatter around a value inside the margin."""
    pilot, scatter = 16, 0.1
    needed = windows_within(around(value, 1.959964 * scatter / math.sqrt(pilot), pilot), MARGIN)
    rng, numbers = np.random.default_rng(3), np.arange(needed)
    again = [
        BOOT.mean(Column.of(numbers, np.zeros_like(numbers), value + scatter * rng.standard_normal(needed)))
        for _ in range(300)
    ]
    assert 0.74 < np.mean([within(one, MARGIN) == "equivalent" for one in again]) < 0.86


def test_windows_within_at_the_limits():
    assert windows_within(around(0.0, 0.01), MARGIN) == 32  # settled
    assert windows_within(around(MARGIN, 0.01), MARGIN) is None
    outside = around(0.03, 0.02)
    assert windows_within(outside, MARGIN) == windows_for_sign(around(0.01, 0.02))


def test_windows_below_one():
    low, high = around(-0.5, 1), around(0.5, 1)
    assert windows_below_one([low, high]) == windows_for_sign(low)
    assert windows_below_one([high, around(0.2, 1)]) == windows_for_sign(around(0.2, 1))
    assert windows_below_one([around(-2, 1), high]) == 32
    assert windows_below_one([around(0.0, 1), high]) is None
