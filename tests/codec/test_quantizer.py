import pytest
import torch

from kvlab.codecs.shared import quantizer
from kvlab.core.errors import NonFinite, StorageError
from refusals import refused

# Max (1960), table I, and Paez and Glisson (1972): mean squared error of the optimal quantiser of N(0, 1)
PUBLISHED = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


def gaussian(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bits", PUBLISHED)
def test_gaussian_table_reaches_the_published_error(bits):
    table = quantizer.gaussian_table(bits)
    assert quantizer.mse(table) == pytest.approx(PUBLISHED[bits], rel=3e-3)
    samples = gaussian(400_000)
    error = (table[quantizer.quantise(samples, table)] - samples).square().mean().item()
    assert error == pytest.approx(quantizer.mse(table), rel=0.02)


@pytest.mark.parametrize("bits", range(1, 9))
def test_gaussian_table_is_a_symmetric_ascending_fixed_point(bits):
    table = quantizer.gaussian_table(bits)
    assert table.shape == (2**bits,)
    assert (table.diff() > 0).all()
    assert torch.equal(table, -table.flip(0))
    for place in range(0, 2**bits, max(1, 2**bits // 8)):
        for nudge in (-1e-4, 1e-4):
            moved = table.clone()
            moved[place] += nudge
            assert quantizer.mse(moved) > quantizer.mse(table)


def test_high_rate_follows_panter_and_dite():
    # D ~ sqrt(3) pi / 2 * 4^-b (Panter and Dite 1951); the exact value approaches it from below
    ratios = [quantizer.mse(quantizer.gaussian_table(b)) / (3**0.5 * torch.pi / 2 * 4.0**-b) for b in range(1, 9)]
    assert ratios == sorted(ratios)
    assert 0.98 < ratios[-1] < 1


def test_quantise_is_the_nearest_value_and_the_lower_one_on_a_tie():
    table = torch.tensor([-3.0, -1.0, 1.0, 2.0])
    assert quantizer.quantise(torch.tensor([-2.0, -9.0, 0.0, 1.5, 1.6, 7.0]), table).tolist() == [0, 0, 1, 2, 3, 3]
    z = gaussian(5000)
    table = quantizer.gaussian_table(4)
    assert torch.equal(quantizer.quantise(z, table), (z[:, None] - table).abs().argmin(-1))


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_the_indices_of_the_nearest_values_as_bytes(bits):
    z, table = gaussian(5000).float(), quantizer.gaussian_table(bits).float()
    z = torch.cat((z, quantizer.boundaries(table)))
    codes = quantizer.codes(z, table)
    assert codes.dtype == torch.uint8
    assert torch.equal(codes.long(), torch.bucketize(z, quantizer.boundaries(table)))
    assert torch.equal(quantizer.quantise(z, table), codes.long())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_fit_on_gaussian_samples_gives_the_gaussian_table(bits):
    fitted = quantizer.fit(gaussian(1_000_000), bits)
    assert fitted.dtype == torch.float32
    assert torch.allclose(fitted.double(), quantizer.gaussian_table(bits), atol=0.02)
    assert quantizer.mse(fitted) == pytest.approx(quantizer.mse(quantizer.gaussian_table(bits)), rel=1e-3)


@pytest.mark.parametrize("bits", [1, 3, 6, 8])
def test_fit_beats_the_gaussian_table_on_its_own_pool(bits):
    pool = torch.distributions.Laplace(0.4, 0.7).icdf(torch.linspace(0.001, 0.999, 20_001, dtype=torch.float64))
    errors = [
        (table[quantizer.quantise(pool, table)] - pool).square().mean()
        for table in (quantizer.fit(pool, bits).double(), quantizer.gaussian_table(bits))
    ]
    assert errors[0] < 0.97 * errors[1]


def test_fit_on_truncated_gaussian_matches_the_known_optimum():
    # the 3-bit optimum of N(0, 1) within |z| <= 2, as tabulated for an outlier threshold of 2
    samples = gaussian(2_000_000)
    fitted = quantizer.fit(samples[samples.abs() <= 2], 3)
    assert torch.allclose(fitted[4:], torch.tensor([0.2016, 0.6160, 1.0694, 1.6118]), atol=0.01)


def test_fit_leaves_an_empty_cell_where_it_was():
    fitted = quantizer.fit(torch.full((100,), 0.3), 2)
    start = quantizer.gaussian_table(2)
    assert torch.allclose(fitted[[0, 1, 3]].double(), start[[0, 1, 3]])
    assert fitted[2] == pytest.approx(0.3)


def test_fit_puts_a_sample_on_a_boundary_below_it():
    assert quantizer.fit(torch.tensor([-2.0, 0.0, 3.0]), 1).tolist() == [-1, 3]


def test_fit_refuses_what_it_cannot_fit():
    with pytest.raises(NonFinite):
        quantizer.fit(torch.tensor([0.0, float("nan")]), 2)
    with refused(StorageError, "storage.no-samples"):
        quantizer.fit(torch.tensor([]), 2)
