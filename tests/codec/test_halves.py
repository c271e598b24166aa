"""Matrices in half precision: off by their rounding alone, the same in whatever units; memory that is lent."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.codecs.klt.halves import HalfMatrix, scratch
from tiers import examples

CPU = torch.device("cpu")


def drawn(seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, 7, generator=source) * torch.exp(4 * torch.randn(2, 5, 7, generator=source))


@examples(50)
@given(st.integers(0, 999))
def test_an_entry_is_off_by_its_rounding_alone_and_rounds_once(seed):
    matrix = drawn(seed)
    halved = HalfMatrix.of(matrix, CPU)
    full, unit = halved.full(), halved.row * halved.column
    assert ((full - matrix).abs() <= 2.0**-11 * matrix.abs() + 2.0**-25 * unit).all()
    again = HalfMatrix.of(full, CPU)
    moved, other = (again.full() - full).abs(), again.row * again.column
    assert not moved[other == unit].any()
    assert (moved <= 2.0**-25 * other).all()  # what rounds up to a power of two has the next unit


@examples(50)
@given(st.integers(0, 999), st.lists(st.integers(-20, 20), min_size=7, max_size=7))
def test_the_units_of_a_channel_make_no_difference(seed, powers):
    matrix, units = drawn(seed), 2.0 ** torch.tensor(powers)
    assert torch.equal(HalfMatrix.of(matrix * units, CPU).full(), HalfMatrix.of(matrix, CPU).full() * units)


def test_zeros_stay_zeros():
    matrix = torch.zeros(1, 3, 4)
    matrix[0, 1, 2] = 7
    assert torch.equal(HalfMatrix.of(matrix, CPU).full(), matrix)


def test_scratch_outlives_inference_mode():
    halved = HalfMatrix.of(torch.eye(3)[None] * 5, CPU)
    with torch.inference_mode():
        first = halved.full(scratch("tested", 1, 3, 3))
    again = halved.full(scratch("tested", 1, 3, 3))
    assert first.data_ptr() == again.data_ptr() and torch.equal(again, torch.eye(3)[None] * 5)
