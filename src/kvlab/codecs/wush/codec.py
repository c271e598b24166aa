"""WUSH-KV (Chen et al. 2026; WUSH: arXiv 2512.00956): the transform of both factors' second moments, in closed form."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvlab.codecs.base import Arrays, Stats, StreamCalibration, stored
from kvlab.codecs.shared import fp16, hadamard_pad, quantizer, rotation
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.front import Front, needed
from kvlab.codecs.shared.metric import ridged
from kvlab.codecs.shared.products import product
from kvlab.codecs.shared.token_blocks import TokenBlockCodec
from kvlab.codecs.shared.transform import fixed_sign
from kvlab.codecs.stream import packing
from kvlab.codecs.wush import WushStream
from kvlab.core.codec_settings import Conditioned
from kvlab.core.errors import CalibrationMismatch

RIDGE = 1e-3  # of the second moment, in units of its own diagonal


class Transform(NamedTuple):
    """T of each head as rows are multiplied by it, float32 [heads, head_dim, width], and its inverse."""

    forward: Tensor
    inverse: Tensor


class WushCodec(TokenBlockCodec):
    """x T on 2**bits even levels about zero, their step a fixed share of the root mean square of each token's head.

    T makes the coordinates' variances equal, and equal what an error of each weighs. Stored are codes and, per token
    and head, the step as float16: bits + 16 / head_dim per value, where head_dim is a power of two.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, recipe: WushStream, calibration: StreamCalibration | None = None):
        super().__init__(recipe, calibration)
        self._transforms: dict[int, Transform] = {}

    def make_front(self) -> Front:
        """Mean removal alone; T is the metric."""
        return Front(Conditioned(center=self.recipe.center), self.calibration)

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes and steps of one block."""
        turned = product(rows, self._transform(layer, rows.shape).forward.to(rows.device))
        share = 2 * reach(self.recipe.bits) / (2**self.recipe.bits - 1)
        step = fp16.nearest(turned.square().mean(-1).sqrt() * share, "step of a token", layer)
        half = 2 ** (self.recipe.bits - 1)
        cells = (turned / torch.where(step > 0, step, 1).float()[..., None]).floor().clamp(-half, half - 1)
        codes = (cells + half).to(torch.uint8)
        return (packing.pack(codes.flatten(), self.recipe.bits), step), Stats(n_coefficients=codes.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """The middles of the cells that the codes name, turned back."""
        heads, tokens, head_dim = shape
        bits, width = self.recipe.bits, hadamard_pad.width(head_dim)
        count = heads * tokens * width
        size = packing.packed_size(count, bits)
        codes, step = stored(arrays, (torch.uint8, (size,)), (torch.float16, (heads, tokens)))
        middles = packing.unpack(codes, bits, count).view(heads, tokens, width) - (2 ** (bits - 1) - 0.5)
        return product(fp16.read(step)[..., None] * middles, self._transform(layer, shape).inverse.to(codes.device))

    def _transform(self, layer: int, shape: tuple[int, int, int]) -> Transform:
        if layer not in self._transforms:
            own = needed(self.calibration.components, layer, "codec: wush", "covariance")
            mean = torch.zeros_like(own.mean) if self.recipe.center else own.mean
            moment = own.head_covariance.double() + mean.double()[:, :, None] * mean.double()[:, None, :]
            self._transforms[layer] = wush(ridged(moment.cpu(), RIDGE), own.head_metric.cpu())
        found = self._transforms[layer]
        if (shape[0], shape[2]) != tuple(found.forward.shape[:2]):
            raise CalibrationMismatch(
                f"the calibrated transform is for {found.forward.shape[0]} KV heads of {found.forward.shape[1]}"
                f" dimensions, the tensor has {shape[0]} of {shape[2]}; calibrate this model",
                code="calibration.other-shape",
            )
        return found


def wush(moment: Tensor, metric: Tensor) -> Transform:
    """The closed form for rows of second moment M whose errors are weighed by the metric L L^T.

    With L^T M L = U diag(lambda) U^T it is T = c L U diag(lambda)^(-1/4) H: T^T M T and the metric in the new
    coordinates are then the same matrix but for a factor, H diag(lambda)^(1/2) H, whose diagonal is constant.

    Parameters
    ----------
    moment, metric : Tensor
        float64 [heads, head_dim, head_dim], positive definite; rows are multiplied by T from the right.

    Returns
    -------
    Transform
        c keeps the mean square of a row. Where head_dim is no power of two, H spreads it over the next one.
    """
    chol = torch.linalg.cholesky(metric)
    values, vectors = torch.linalg.eigh(chol.mT @ moment @ chol)
    vectors, root = fixed_sign(vectors, dim=-2), values.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    size = (moment.diagonal(dim1=-2, dim2=-1).sum(-1) / root.sum(-1)).sqrt()[:, None, None]
    quarter = root.sqrt()
    forward = size * (chol @ vectors) / quarter[:, None]
    inverse = quarter[:, :, None] * torch.linalg.solve_triangular(chol.mT, vectors, upper=True).mT / size
    wide = hadamard_pad.width(moment.shape[-1])
    spread = [rotation.hadamard(pad(x, (0, wide - x.shape[-1]))) / wide**0.5 for x in (forward, inverse.mT)]
    return Transform(spread[0].float().contiguous(), spread[1].mT.float().contiguous())


@lru_cache(maxsize=8)
@apart
def reach(bits: int) -> float:
    """How many standard deviations of a Gaussian the outermost level's far edge reaches for the least squared error.

    QuEST INT (Panferov et al. 2025, arXiv 2502.05003): a grid of even cells about zero, read as their middles.
    """
    half = 2 ** (bits - 1)
    cells = torch.arange(-half, half, dtype=torch.float64) + 0.5

    def error(far: float) -> float:
        return quantizer.mse(cells * 2 * far / (2 * half - 1))

    low, high = 0.1, 12.0  # the error has one minimum between them
    for _ in range(60):
        third = (high - low) / 3
        low, high = (low, high - third) if error(low + third) < error(high - third) else (low + third, high)
    return (low + high) / 2
