"""WUSH's closed form: what it equalises, and the distortion that follows from it."""

import pytest
import torch

from codec import ladder_making, making
from codec.making import SITE
from kvlab.codecs.base import StreamCalibration
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.registry import build
from kvlab.codecs.shared import components, quantizer
from kvlab.codecs.wush import WushStream
from kvlab.codecs.wush.codec import reach, wush
from kvlab.core.errors import CalibrationMismatch
from refusals import refused


def moments(dim=64, heads=2):
    rows = ladder_making.planted(heads, 2000, dim).double()
    return rows.mT @ rows / rows.shape[1], making.second_moment(heads, dim)


@pytest.mark.parametrize("dim", [16, 48, 64])
def test_in_its_coordinates_all_vary_alike_and_weigh_alike(dim):
    moment, metric = moments(dim)
    forward, inverse = (part.double() for part in wush(moment, metric))
    torch.testing.assert_close(forward @ inverse, torch.eye(dim).double().expand(2, -1, -1), rtol=0, atol=2e-4)
    varies, weighs = forward.mT @ moment @ forward, inverse @ metric @ inverse.mT
    ratio = (varies.diagonal(dim1=-2, dim2=-1).sum(-1) / weighs.diagonal(dim1=-2, dim2=-1).sum(-1))[:, None, None]
    assert (varies - ratio * weighs).norm() < 1e-3 * varies.norm()
    diagonal = varies.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal.sum(-1), moment.diagonal(dim1=-2, dim2=-1).sum(-1), rtol=1e-3, atol=0)
    assert (diagonal / diagonal.mean(-1, keepdim=True) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("bits", [3, 4])  # a token's own root mean square is not the grid's: at 2 and 6 bits it shows
def test_the_weighted_error_is_that_of_even_levels_times_the_squared_mean_of_the_square_roots(bits):
    """Of Gaussian rows: d * (mean of lambda^(1/2))^2 * the grid's error at unit variance; and below Hadamard's."""
    dim, source = 64, torch.Generator().manual_seed(0)
    metric = making.second_moment(1, dim)
    root = torch.randn(dim, dim, generator=source, dtype=torch.float64) * torch.logspace(1, -1, dim)[:, None]
    rows = (torch.randn(1, 3000, dim, generator=source, dtype=torch.float64) @ root).float()
    fitted = components.fit(rows.unflatten(1, (2, -1)), metric)
    calibration = StreamCalibration(components={SITE.layer: fitted})

    def weighted(stream):
        codec = build(stream, calibration)
        off = (codec.decode(codec.encode(rows, SITE)) - rows).double()
        return ((off @ metric) * off).sum(-1).mean().item()

    chol = torch.linalg.cholesky(metric)
    values = torch.linalg.eigvalsh(chol.mT @ (root.mT @ root) @ chol)
    half = 2 ** (bits - 1)
    grid = (torch.arange(-half, half).double() + 0.5) * 2 * reach(bits) / (2**bits - 1)
    expected = dim * values.sqrt().mean().square().item() * quantizer.mse(grid)
    assert weighted(WushStream(bits=bits)) == pytest.approx(expected, rel=0.1)
    assert weighted(WushStream(bits=bits)) < 0.7 * weighted(HadamardStream(bits=bits))


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_reach_has_the_least_error(bits):
    half = 2 ** (bits - 1)
    cells = torch.arange(-half, half).double() + 0.5
    least, *others = (quantizer.mse(cells * 2 * reach(bits) * by / (2**bits - 1)) for by in (1, 0.97, 1.03))
    assert least < min(others)


def test_without_a_calibration_or_with_one_of_another_shape_it_is_refused():
    with refused(CalibrationMismatch, "calibration.missing", "codec: wush"):
        build(WushStream(bits=2)).encode(ladder_making.planted(), SITE)
    with refused(CalibrationMismatch, "calibration.other-shape", "2 KV heads of 32"):
        build(WushStream(bits=2), ladder_making.calibration(2, 32)).encode(ladder_making.planted(), SITE)
