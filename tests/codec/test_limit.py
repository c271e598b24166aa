"""The rate-distortion limit against planted spectra whose answers are known on paper."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.codecs.shared import quantizer
from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import NonFinite, UserError
from validation.limit import theory as limit

DOUBLING = torch.tensor([16.0, 4.0, 1.0], dtype=torch.float64)


def rows_of(eigenvalues, count=400, seed=0):
    """Rows [1, count, n] whose empirical covariance has exactly these eigenvalues, turned at random."""
    turn = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), generator=generator(seed))[None].double()).Q
    colour = turn @ torch.diag(torch.as_tensor(eigenvalues).double()) @ turn.mT
    planted = torch.linalg.cholesky(colour)
    white = limit.gaussian_twin(torch.randn(1, count, len(eigenvalues), generator=generator(seed, 1)), generator(2))
    own = torch.linalg.cholesky(limit.covariance(white))
    white = torch.linalg.solve_triangular(own.mT, white, upper=True, left=False)
    return white @ planted.mT


def test_planted_spectrum_at_two_levels():
    # theta = 1/4 leaves all three in the dry: 3, 2 and 1 bit.
    assert limit.distortion_at(DOUBLING, 2.0).item() == pytest.approx(0.25, rel=1e-12)
    assert limit.rate_at(DOUBLING, 0.25).item() == pytest.approx(2.0, rel=1e-12)
    # theta = 2 drowns the last one: 3/2 and 1/2 bit, distortion (2 + 2 + 1) / 3.
    assert limit.water_level(DOUBLING, 2 / 3).item() == pytest.approx(2.0, rel=1e-12)
    assert limit.distortion_at(DOUBLING, 2 / 3).item() == pytest.approx(5 / 3, rel=1e-12)
    assert limit.rate_at(DOUBLING, 5 / 3).item() == pytest.approx(2 / 3, rel=1e-12)


def test_ends_of_the_curve():
    assert limit.distortion_at(DOUBLING, 0.0).item() == pytest.approx(7.0)
    assert limit.rate_at(DOUBLING, 7.0).item() == 0
    assert limit.rate_at(DOUBLING, 100.0).item() == 0
    assert limit.rate_at(DOUBLING, 0.0).item() == math.inf
    singular = torch.tensor([4.0, 0.0])
    assert limit.distortion_at(singular, 1.0).item() == pytest.approx(4 / 2 / 16)
    assert limit.rate_at(singular, 4 / 2 / 16).item() == pytest.approx(1.0)
    assert limit.distortion_at(torch.zeros(3), 1.0).item() == 0


spectra = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12)


@given(spectra, st.floats(0.01, 12))
def test_rate_and_distortion_undo_each_other(values, bits):
    eigenvalues = torch.tensor(values, dtype=torch.float64)
    distortion = limit.distortion_at(eigenvalues, bits)
    assert limit.rate_at(eigenvalues, distortion).item() == pytest.approx(bits, rel=1e-6, abs=1e-9)
    assert limit.distortion_at(eigenvalues, bits + 0.1) < distortion


@given(spectra, st.floats(0.01, 8))
def test_no_other_error_profile_is_cheaper(values, bits):
    eigenvalues = torch.tensor(values, dtype=torch.float64)
    profile = torch.rand(len(values), generator=generator(str(values)), dtype=torch.float64) * eigenvalues
    cost = (eigenvalues / profile).log2().mean() / 2
    assert limit.rate_at(eigenvalues, profile.mean()) <= cost + 1e-9


def test_one_bit_is_six_decibels_at_high_rate():
    ratio = limit.distortion_at(DOUBLING, 5.0) / limit.distortion_at(DOUBLING, 6.0)
    assert 10 * ratio.log10().item() == pytest.approx(20 * math.log10(2))


def test_layers_and_heads_at_once():
    eigenvalues = torch.rand(3, 2, 8, generator=generator(0)) + 0.01
    bits = torch.tensor([1.0, 2.0, 3.0])[:, None]
    together = limit.distortion_at(eigenvalues, bits)
    assert together.shape == (3, 2) and together.dtype == torch.float64
    for layer, head in torch.cartesian_prod(torch.arange(3), torch.arange(2)).tolist():
        alone = limit.distortion_at(eigenvalues[layer, head], float(bits[layer]))
        assert together[layer, head] == pytest.approx(alone.item())
    assert torch.allclose(limit.rate_at(eigenvalues, together), bits.double().expand(3, 2))


def test_weighted_spectrum_is_that_of_the_whitened_rows():
    rows = torch.randn(2, 300, 6, generator=generator(1)).double()
    queries = torch.randn(2, 50, 6, generator=generator(2)).double()
    weight = queries.mT @ queries / 50
    whitened = rows @ torch.linalg.cholesky(weight)
    found = limit.spectrum(limit.covariance(rows), weight)
    assert torch.allclose(found, limit.spectrum(limit.covariance(whitened)))
    assert (found.diff() <= 0).all()
    with pytest.raises(NonFinite):
        limit.spectrum(limit.covariance(rows), weight * math.nan)


def test_coding_gain_is_what_equal_bits_forfeit():
    assert limit.coding_gain(torch.ones(5)).item() == 0
    bits, gain = 6.0, limit.coding_gain(DOUBLING).item()
    equal = DOUBLING.mean() * 4**-bits  # an ideal code of `bits` everywhere, after a rotation
    assert bits - limit.rate_at(DOUBLING, equal).item() == pytest.approx(gain)
    assert gain == pytest.approx(0.5 * math.log2(7 / 4))


def test_ideal_code_has_no_excess_and_zero_decibels():
    distortion = torch.minimum(DOUBLING, torch.tensor(2.0)).mean()
    assert limit.decibels_above(DOUBLING, distortion, 2 / 3).item() == pytest.approx(0, abs=1e-9)
    at = limit.rate_at(DOUBLING, distortion).item()
    parts = limit.split(real=2 / 3, index=2 / 3, ideal=2 / 3, at_twin=at, at_oracle=at, at_scored=at)
    assert all(abs(getattr(parts, name)) < 1e-9 for name in ("excess", *limit.PARTS))


@given(st.lists(st.floats(0, 20), min_size=6, max_size=6))
def test_the_parts_sum(chain):
    parts = limit.split(*chain)
    assert sum(getattr(parts, name) for name in limit.PARTS) == pytest.approx(parts.excess, abs=1e-9)


def test_lloyd_max_losses():
    found = limit.lloyd_max_loss([0, 1, 2, 3, 4, 8]).tolist()
    assert found[:5] == pytest.approx([0, 0.270, 0.455, 0.572, 0.641], abs=5e-4)
    assert found[5] < 0.5 * math.log2(math.sqrt(3) * math.pi / 2)


def test_split_of_a_rotated_scalar_codec_on_a_gaussian_source():
    """Equal bits after a rotation lose the coding gain in allocation and the table's loss in granular."""
    eigenvalues = torch.logspace(0, -1, 32, dtype=torch.float64)
    rows = rows_of(eigenvalues, 20000)
    spectrum = limit.spectrum(limit.covariance(rows))
    assert torch.allclose(spectrum[0], eigenvalues)
    turn = torch.linalg.qr(torch.randn(32, 32, generator=generator("turn")).double()).Q
    scale = spectrum.mean().sqrt()
    table = quantizer.gaussian_table(4)
    turned = rows @ turn / scale
    error = (table[quantizer.quantise(turned, table)] - turned) * scale
    at = limit.rate_at(spectrum, error.square().mean()).mean().item()
    granular = limit.lloyd_max_loss([4]).item()
    parts = limit.split(real=4.25, index=4.0, ideal=4 - granular, at_twin=at, at_oracle=at, at_scored=at)
    assert parts.metadata == pytest.approx(0.25)
    assert parts.granular == pytest.approx(0.641, abs=1e-3)
    assert parts.allocation == pytest.approx(limit.coding_gain(eigenvalues).item(), abs=0.05)
    assert (parts.shape, parts.mismatch) == (0, 0)


def test_twin_has_the_mean_and_the_covariance_and_is_gaussian():
    rows = (
        torch.randn(2, 3000, 8, generator=generator(3)).double().pow(3)
        @ torch.randn(8, 8, generator=generator(4)).double()
        + 5
    )
    twin = limit.gaussian_twin(rows, generator("twin"))
    assert torch.allclose(twin.mean(1), rows.mean(1))
    assert torch.allclose(limit.covariance(twin), limit.covariance(rows))
    kurtosis = [((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)).pow(4).mean().item() for x in (rows, twin)]
    assert kurtosis[0] > 4 and kurtosis[1] == pytest.approx(3, abs=0.2)
    with pytest.raises(UserError):
        limit.gaussian_twin(rows[:, :8], generator(0))


def test_log_det_bias_against_simulation():
    size, count, rounds = 16, 64, 400
    draws = torch.randn(rounds, count, size, generator=generator("bias"), dtype=torch.float64)
    found = limit.covariance(draws).logdet().mean().item() / (2 * size * math.log(2))
    assert limit.log_det_bias(size, count) == pytest.approx(found, abs=4e-3)
    assert limit.log_det_bias(128, 4096) == pytest.approx(-129 / (4 * 4096 * math.log(2)), rel=0.05)
    with pytest.raises(UserError):
        limit.log_det_bias(16, 16)
