"""Vectors without tables: what they take, what they lose, and that this is known beforehand."""

from __future__ import annotations

import pytest
import torch

from kvlab.codecs.klt.bits import bits_of_value, value_of
from kvlab.codecs.klt.plain import PlainGroup, turn
from kvlab.codecs.klt.scales import ABOUT_SINK, LOUD, PLAIN, SCALE_BITS, SCALES, UPWARD, steps_down, steps_up
from kvlab.codecs.shared.quantizer import gaussian_table, mse


@pytest.mark.parametrize("width", [2, 12, 63, 192, 256])
def test_the_turn_is_orthonormal_and_spreads_a_single_component(width):
    matrix = turn(width)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(width, dtype=torch.float64), atol=1e-12, rtol=0)
    assert matrix.abs().max() <= (2 / width) ** 0.5 + 1e-12


def group(width=96, mean_bits=3):
    """Components of falling deviation, with bits to match; the first two hold something else in their lowest bits."""
    widths = torch.linspace(2 * mean_bits, 0, width).round().long().clamp(max=8)
    taken = torch.zeros(width, dtype=torch.int64)
    taken[:2] = 2
    return PlainGroup(widths, taken, torch.logspace(0, -2, width), torch.device("cpu")), widths, taken


@pytest.mark.parametrize("bits", [1, 3, 4])
def test_the_error_is_a_known_part_of_a_vector_whatever_it_looks_like(bits):
    own, widths, taken = group(mean_bits=bits)
    assert len(own.component) == int((widths - taken).sum())
    assert len({*zip(own.component.tolist(), own.place.tolist(), strict=True)}) == len(own.component)
    assert all(int(place) >= int(taken[at]) for at, place in zip(own.component, own.place, strict=True))
    spikes, source = torch.zeros(40, 96), torch.Generator().manual_seed(0)
    spikes[torch.arange(40), torch.arange(40)] = 1e4
    for z in (spikes, torch.randn(40, 96, generator=source) * 30):
        coefficients, size = own.turned(z)
        packed = own.encode(coefficients, size)
        assert packed.shape == (40, len(own.component)) and int(packed.max()) <= 1
        decoded = own.decode(packed, size)
        deviation = torch.logspace(0, -2, 96)
        error = ((decoded - z) * deviation).square().sum(1)
        torch.testing.assert_close(own.error(coefficients, size), error, rtol=1e-2, atol=0)
        whole, each = divmod(len(own.component), 96)
        best = (each * mse(gaussian_table(whole + 1)) + (96 - each) * (mse(gaussian_table(whole)) if whole else 1)) / 96
        assert (error / (z * deviation).square().sum(1)).mean() < 1.35 * best


def test_a_vector_of_nothing_comes_back_as_nothing():
    own, *_ = group()
    coefficients, size = own.turned(torch.zeros(3, 96))
    assert not own.decode(own.encode(coefficients, size), size).any()


def test_values_are_stored_to_a_thousandth_up_to_four_billions():
    values = torch.tensor([0.0, 1e-4, -3.7, 250.0, -4.1e9, 1e30])
    found = value_of(bits_of_value(values))
    assert found[0] == 0 and found[-1] == 65504.0**2
    torch.testing.assert_close(found[1:-1], values[1:-1], rtol=2e-3, atol=0)


def test_scales_are_as_many_as_their_number_can_say_and_fit_levels():
    assert (
        len(SCALES) == 1 << SCALE_BITS and SCALES[PLAIN] == 1 and SCALES[PLAIN + 1 :].tolist() == pytest.approx(UPWARD)
    )
    levels = torch.tensor([0.3, 1.0, 1.1, LOUD, 4.0, 250.0, 1e9])
    up = steps_up(levels)
    assert up.tolist() == [0, 0, 0, 1, 4, 16, 16]
    down = steps_down(torch.tensor([2.0, 1.0, 0.2, 1e-30, 0.0]))
    assert down.tolist() == [-1, 0, 1, len(ABOUT_SINK) - 1, len(ABOUT_SINK) - 1]
