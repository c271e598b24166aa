from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.codecs.klt.allocation import bits_of, spending_order
from kvlab.codecs.klt.marginal import MAX_WIDTH, Marginals
from kvlab.codecs.shared.quantizer import gaussian_table, mse
from kvlab.codecs.shared.sketch import gaussian_sketch
from tiers import examples

GAUSSIAN = torch.tensor([1.0] + [mse(gaussian_table(bits)) for bits in range(1, MAX_WIDTH + 1)], dtype=torch.float64)


def reverse_water_filling(table, total):
    return bits_of(spending_order(table), total, len(table))


def distortion_of(table, bits):
    return table.gather(1, torch.as_tensor(bits)[:, None]).sum().item()


@examples(40)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4), st.integers(0, 9))
def test_no_allocation_of_the_same_total_is_better(variances, total):
    table = torch.tensor(variances, dtype=torch.float64)[:, None] * GAUSSIAN[:5]
    total = min(total, 4 * len(variances))
    bits = reverse_water_filling(table, total)
    assert bits.sum() == total and bits.min() >= 0 and bits.max() <= 4
    every = (each for each in product(range(5), repeat=len(variances)) if sum(each) == total)
    best = min(distortion_of(table, list(each)) for each in every)
    assert distortion_of(table, bits) == pytest.approx(best, rel=1e-12)


def test_marginal_gains_of_the_tables_decrease():
    assert (GAUSSIAN.diff().diff() > 0).all()
    fitted = Marginals(gaussian_sketch(1)).distortion()
    assert (fitted.diff(dim=1).diff(dim=1) > 0).all()
    assert torch.allclose(fitted[0], GAUSSIAN, rtol=0.01)


def test_allocations_of_growing_totals_are_nested():
    table = torch.logspace(0, -4, 20, dtype=torch.float64)[:, None] * GAUSSIAN
    order = spending_order(table)
    for total in range(1, 20 * MAX_WIDTH + 1):
        grown = bits_of(order, total, 20) - bits_of(order, total - 1, 20)
        assert grown.sum() == 1 and grown.min() == 0


def test_distortions_level_out_at_one_water_level():
    variance = torch.logspace(1, -3, 64, dtype=torch.float64)
    bits = reverse_water_filling(variance[:, None] * GAUSSIAN, 128)
    assert (bits.diff() <= 0).all()
    levels = variance * GAUSSIAN[bits]
    coded = levels[bits > 0]
    assert coded.max() / coded.min() < 4  # a bit is a factor of 4 at most
    assert variance[bits == 0].max() < 2 * coded.max()


def test_ties_and_kinks_have_one_answer():
    flat = torch.ones(4, 1, dtype=torch.float64) * GAUSSIAN
    assert reverse_water_filling(flat, 6).tolist() == [2, 2, 1, 1]
    kinked = torch.tensor([[1.0, 0.9, 0.1], [1.0, 0.5, 0.4]], dtype=torch.float64)
    assert reverse_water_filling(kinked, 4).tolist() == [2, 2]
