import pytest
import torch

from codec.making import recipe
from kvlab.codecs.shared import transform


def planted(energies, rows=400, seed=0):
    """One block [1, rows, D] whose centred Gram matrix has exactly these eigenvalues, and its axes."""
    dim = len(energies)
    source = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, dim, generator=source, dtype=torch.float64)
    left = torch.linalg.qr(left - left.mean(0)).Q
    axes = torch.linalg.qr(torch.randn(dim, dim, generator=source, dtype=torch.float64)).Q
    return (left * torch.tensor(energies, dtype=torch.float64).sqrt()) @ axes.T + 3, axes.T


@pytest.mark.parametrize(("ratio", "expected"), [(0.5, 1), (0.639, 1), (0.641, 2), (0.9, 3), (0.98, 4), (1.0, 8)])
def test_exact_rank_is_relative_to_the_total(ratio, expected):
    rows, _ = planted([64, 20, 10, 5, 1, 0, 0, 0])
    pca = transform.fit(rows[None], recipe(pca="exact", variance_ratio=ratio))
    assert pca.d_eff.tolist() == [expected]


def test_randomised_rank_is_relative_to_the_sketch():
    # the total is 100; a sketch of r = 2 + 2 retains 80, and 0.8 of that is reached by two components
    energies = [40, 25, 10, 5] + [5] * 4
    rows, _ = planted(energies)
    settings = {"variance_ratio": 0.8, "rank_fraction": 0.25, "oversample": 2, "power_iterations": 60}
    assert transform.fit(rows[None], recipe(pca="randomized", **settings)).d_eff.tolist() == [2]
    assert transform.fit(rows[None], recipe(pca="exact", **settings)).d_eff.tolist() == [4]


@pytest.mark.parametrize(("dim", "fraction", "rank"), [(8, 0.5, 4), (8, 0.1, 2), (9, 0.5, 4), (8, 1.0, 8), (1, 1.0, 1)])
def test_full_ratio_keeps_the_target_rank_exactly(dim, fraction, rank):
    rows, _ = planted([float(2**-i) for i in range(dim)])
    blocks = torch.stack((rows, rows.flip(0) * 5))
    assert transform.fit(blocks, recipe(rank_fraction=fraction)).d_eff.tolist() == [rank, rank]
    assert transform.fit(blocks, recipe(pca="exact")).d_eff.tolist() == [dim, dim]


def test_rank_never_exceeds_the_rows_and_a_constant_block_keeps_one():
    short = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    assert transform.fit(short, recipe()).d_eff.tolist() == [3]
    for constant in (torch.zeros(1, 20, 8), torch.full((1, 20, 8), 12.3), torch.randn(1, 1, 8)):
        for method in ("exact", "randomized"):
            assert transform.fit(constant, recipe(pca=method)).d_eff.tolist() == [1]


@pytest.mark.parametrize("method", ["exact", "randomized"])
def test_axes_are_the_planted_ones_with_a_fixed_sign(method):
    rows, axes = planted([1e4, 1e3, 1e2, 10, 1, 0.1, 0.01, 0.001])
    pca = transform.fit(rows[None], recipe(pca=method, rank_fraction=0.5, oversample=2))
    found = pca.axes[0, :4]
    assert torch.allclose((found.double() * axes[:4]).sum(-1).abs(), torch.ones(4, dtype=torch.float64), atol=1e-5)
    largest = found.gather(-1, found.abs().argmax(-1, keepdim=True))
    assert (largest > 0).all()
    assert torch.allclose(pca.mean[0].double(), rows.mean(0))


def test_full_width_sketch_equals_the_exact_transform():
    rows, _ = planted([float(3**-i) for i in range(8)])
    exact = transform.fit(rows[None], recipe(pca="exact"))
    sketched = transform.fit(rows[None], recipe(pca="randomized", rank_fraction=1.0))
    assert torch.allclose(exact.axes, sketched.axes, atol=1e-3)


def test_rank_does_not_depend_on_the_scale():
    rows, _ = planted([64, 20, 10, 5, 1, 0.5, 0.2, 0.1])
    ranks = {int(transform.fit(rows[None] * s, recipe(variance_ratio=0.95)).d_eff) for s in (1e-30, 1e-6, 1, 1e6, 1e30)}
    assert len(ranks) == 1


def test_sketched_axes_are_orthonormal_whatever_the_spectrum():
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 200, 48, generator=source) * torch.logspace(0, -6, 48)
    rows[1, :, 3:] = 0  # three directions only
    rows[2] = 0
    rows[3] *= 1e6
    axes = transform.fit(rows, recipe(rank_fraction=0.6)).axes
    assert torch.allclose(axes @ axes.mT, torch.eye(28).expand(5, -1, -1), atol=2e-6)


def test_large_test_matrices_are_not_kept():
    transform.kept_probe.cache_clear()
    large = transform.probe(3, transform.KEPT // 8 + 1, 8)
    assert transform.kept_probe.cache_info().currsize == 0
    assert torch.equal(transform.probe(3, transform.KEPT // 8 + 1, 8), large)
    assert transform.probe(3, 512, 8) is transform.probe(3, 512, 8)
    assert torch.equal(transform.probe(3, 512, 8), transform.drawn_probe(3, 512, 8))


@pytest.mark.parametrize("dim", [-1, -2])
def test_the_largest_entry_of_an_axis_is_positive(dim):
    axes = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fixed = transform.fixed_sign(axes, dim)
    assert fixed.dtype == axes.dtype and torch.equal(fixed.abs(), axes.abs())
    assert (fixed.amax(dim) == axes.abs().amax(dim)).all()


@pytest.mark.parametrize(("cap", "expected"), [(None, 5), (3, 3), (8, 5), (100, 5), (1, 1)])
def test_rank_cap_of_the_exact_transform(cap, expected):
    rows, _ = planted([10, 9, 8, 7, 6, 0.01, 0.01, 0.01])
    pca = transform.fit(rows[None], recipe(pca="exact", variance_ratio=0.99, exact_rank_cap=cap))
    assert pca.d_eff.tolist() == [expected] and pca.axes.shape[1] == expected
