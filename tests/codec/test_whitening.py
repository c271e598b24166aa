import pytest
import torch

from codec.making import second_moment, stream
from kvlab.codec import whitening
from kvlab.errors import CalibrationMismatch, NonFinite

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
    scale = sigma.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    weight = sigma + RIDGE * scale * torch.eye(64, dtype=torch.float64)
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
    expected = sigma[1] + (RIDGE + 1e-2) * scale * torch.eye(64, dtype=torch.float64)
    product = whitener.chol[1].double() @ whitener.chol[1].double().T
    assert torch.allclose(product, expected, atol=1e-5 * scale.item())


def test_indefinite_or_broken_moments_are_refused():
    with pytest.raises(whitening.NotPositiveDefinite, match="KV head 1"):
        whitening.fit(torch.stack((torch.eye(4), -torch.eye(4))), RIDGE)
    with pytest.raises(NonFinite):
        whitening.fit(torch.full((1, 4, 4), float("nan")), RIDGE)


def test_another_shape_is_refused():
    with pytest.raises(CalibrationMismatch, match="2 KV heads of 64"):
        whitening.fit(second_moment(), RIDGE).whiten(stream(heads=4))
