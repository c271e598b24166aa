import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.making import second_moment, stream
from kvlab.codecs.shared import whitening
from kvlab.core.errors import CalibrationMismatch, NonFinite
from refusals import refused
from tiers import examples

RIDGE = 1e-3


def test_round_trip():
    x = stream()
    whitener = whitening.fit(second_moment(), RIDGE)
    assert whitener.chol.dtype == whitener.inv_chol.dtype == torch.float32
    back = whitener.unwhiten(whitener.whiten(x))
    assert (back - x).norm() / x.norm() < 1e-4


def test_whitened_error_is_the_weighted_error():
    sigma = second_moment()
    whitener = whitening.fit(sigma, RIDGE)
    weight = sigma * (1 + RIDGE * torch.eye(64, dtype=torch.float64))
    error = stream(seed=1) - stream(seed=2)
    direct = torch.einsum("htd,hde,hte->", error.double(), weight, error.double())
    assert whitener.whiten(error).double().square().sum() == pytest.approx(direct.item(), rel=1e-5)


def test_heads_are_whitened_by_their_own_factor():
    whitener = whitening.fit(second_moment(), RIDGE)
    x = stream()
    assert torch.allclose(whitener.whiten(x)[1], x[1] @ whitener.chol[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(whitener.chol, whitener.chol.tril())


def test_extra_ridge_rescues_a_slightly_indefinite_head_only():
    sigma = second_moment()
    scale = sigma[1].diagonal().mean()
    values, vectors = torch.linalg.eigh(sigma[1])
    values[0] = -5e-3 * scale
    sigma[1] = vectors @ torch.diag(values) @ vectors.T
    whitener = whitening.fit(sigma, RIDGE)
    assert torch.equal(whitener.chol[0], whitening.fit(sigma[:1], RIDGE).chol[0])
    unit = torch.eye(64, dtype=torch.float64)
    expected = sigma[1] * (1 + RIDGE * unit) + 1e-2 * scale * unit
    product = whitener.chol[1].double() @ whitener.chol[1].double().T
    assert torch.allclose(product, expected, atol=1e-5 * scale.item())


@pytest.mark.parametrize("silent", [0, 5])
def test_a_channel_that_no_query_uses_is_whitened_by_the_mean(silent):
    sigma = second_moment(2, 8)
    sigma[1, silent], sigma[1, :, silent] = 0, 0
    whitener = whitening.fit(sigma, RIDGE)
    mean = sigma[1].diagonal().mean().item()
    assert whitener.chol[1, silent, silent] == pytest.approx((RIDGE * mean) ** 0.5)
    others = [channel for channel in range(8) if channel != silent]
    kept = whitening.fit(sigma[1:, others][:, :, others], RIDGE).chol[0]
    torch.testing.assert_close(whitener.chol[1, others][:, others], kept)
    assert (whitener.chol[1] @ whitener.inv_chol[1] - torch.eye(8)).abs().max() < 1e-5


@given(exponents=st.lists(st.integers(-7, 7), min_size=16, max_size=16), seed=st.integers(0, 99))
@examples(60)
def test_the_whitened_k_does_not_know_the_channels_units(exponents, seed):
    """Queries times D and keys over D are the same model; powers of two are exact, so K L is the same bit for bit."""
    units = 2.0 ** torch.tensor(exponents, dtype=torch.float64)
    sigma = second_moment(2, 16, seed)
    ours, theirs = whitening.fit(sigma, RIDGE), whitening.fit(units[:, None] * sigma * units, RIDGE)
    assert torch.equal(theirs.chol, units[:, None].float() * ours.chol)
    k = stream(2, 40, 16, seed=seed)
    assert torch.equal(theirs.whiten(k / units.float()), ours.whiten(k))
    assert torch.equal(theirs.unwhiten(k) * units.float(), ours.unwhiten(k))


def test_indefinite_or_broken_moments_are_refused():
    with refused(whitening.NotPositiveDefinite, None, "KV head 1"):
        whitening.fit(torch.stack((torch.eye(4), -torch.eye(4))), RIDGE)
    with pytest.raises(NonFinite):
        whitening.fit(torch.full((1, 4, 4), float("nan")), RIDGE)


def test_another_shape_is_refused():
    with refused(CalibrationMismatch, "calibration.other-shape", "2 KV heads of 64"):
        whitening.fit(second_moment(), RIDGE).whiten(stream(heads=4))
