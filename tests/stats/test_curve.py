"""Reading a curve between its points."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import Fault
from kvlab.stats.curve import between
from refusals import refused

PLACES = st.lists(st.integers(-50, 50), min_size=1, max_size=8, unique=True)


def test_by_hand():
    assert between(np.array([1.0, 3.0]), 1.5).tolist() == [0.75, 0.25]
    assert between(np.array([3.0, 1.0]), 1.5).tolist() == [0.25, 0.75]
    assert between(np.array([2.0, 8.0, 4.0]), 4.0).tolist() == [0, 0, 1]


@given(places=PLACES, share=st.floats(0, 1))
def test_it_is_linear_interpolation(places, share):
    x = np.array(places, dtype=float)
    at = float(x.min() + share * (x.max() - x.min()))
    weights = between(x, min(at, x.max()))
    assert np.count_nonzero(weights) <= 2 and (weights >= 0).all() and weights.sum() == pytest.approx(1)
    assert weights @ x == pytest.approx(min(at, x.max()), abs=1e-9)  # a straight line is read exactly
    values, order = np.sin(x), np.argsort(x)
    assert weights @ values == pytest.approx(np.interp(min(at, x.max()), x[order], values[order]), abs=1e-12)


@given(places=PLACES)
def test_the_order_of_the_points_is_free(places):
    x = np.array(places, dtype=float)
    at, order = float(x.mean()), np.argsort(x)
    assert between(x, at)[order].tolist() == between(x[order], at).tolist()


@given(places=PLACES)
def test_a_point_is_read_as_it_is(places):
    x = np.array(places, dtype=float)
    for i, at in enumerate(x):
        assert between(x, float(at)).tolist() == np.eye(x.size)[i].tolist()


def test_outside_there_is_no_curve():
    x = np.array([1.0, 3.0])
    assert between(x, np.nextafter(1.0, 0)) is None and between(x, np.nextafter(3.0, 4)) is None
    assert between(np.array([]), 1.0) is None


def test_points_at_one_place_are_refused():
    with refused(Fault, "fault.same-place", [2.0, 1.0, 2.0]):
        between(np.array([2.0, 1.0, 2.0]), 1.5)
