import pytest
import scipy.linalg
import torch

from kvlab.codecs.shared import rotation


def sylvester(width):
    return torch.from_numpy(scipy.linalg.hadamard(width)).float()


@pytest.mark.parametrize("width", [1, 2, 4, 8, 32, 128, 256, 512, 1024])
def test_transform_is_the_sylvester_matrix(width):
    assert torch.equal(rotation.hadamard(torch.eye(width)), sylvester(width))
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotation.hadamard(x), x @ sylvester(width), atol=1e-3)


@pytest.mark.parametrize("width", [1, 2, 16, 64, 256, 512])
def test_rotation_is_orthogonal_up_to_its_width_and_inverts(width):
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(1))
    y = rotation.rotate(x, seed=5)
    assert torch.allclose(y.square().sum(-1), width * x.square().sum(-1), rtol=1e-5)
    assert torch.allclose(rotation.hadamard(rotation.hadamard(x)), width * x, rtol=1e-4, atol=1e-6 * width)
    assert torch.allclose(rotation.unrotate(y, seed=5), x, atol=1e-5)
    assert torch.allclose(y, x @ (rotation.signs(5, width)[:, None] * sylvester(width)), atol=1e-3)
    device = x.device
    assert torch.allclose(x @ rotation.forward(5, width, device), y, atol=1e-3)
    assert torch.allclose(y @ rotation.inverse(5, width, device), x, atol=1e-5)


def test_signs_are_fair_and_keyed_by_seed_and_width():
    pattern = rotation.signs(3, 4096)
    assert set(pattern.tolist()) == {-1.0, 1.0}
    assert abs(pattern.mean()) < 0.06
    assert not torch.equal(rotation.signs(4, 4096), pattern)
    assert not torch.equal(rotation.signs(3, 8192)[:4096], pattern)


def test_rotation_makes_a_spike_gaussian_sized():
    z = rotation.rotate(torch.nn.functional.one_hot(torch.tensor(9), 64).float(), seed=1)
    assert torch.equal(z.abs(), torch.ones(64))


@pytest.mark.parametrize("width", [64, 128, 512])
def test_rows_are_rotated_as_if_alone(width):
    x = torch.randn(100, width, generator=torch.Generator().manual_seed(2))
    together = rotation.rotate(x, seed=3)
    assert torch.equal(torch.cat([rotation.rotate(part, seed=3) for part in x.split([1, 2, 3, 30, 64])]), together)
