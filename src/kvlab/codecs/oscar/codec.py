"""OSCAR (arXiv 2605.17757): rotate into what the queries look at, spread, clip, group scales."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import Arrays, Encoded, Site, Stats, StreamCalibration
from kvlab.codecs.oscar import OscarStream
from kvlab.codecs.shared import hadamard_pad, rotation, uniform
from kvlab.codecs.shared.front import needed
from kvlab.codecs.shared.products import product
from kvlab.codecs.shared.token_blocks import TokenBlockCodec
from kvlab.codecs.shared.transform import fixed_sign
from kvlab.codecs.stream.packing import bits_for
from kvlab.core.errors import CalibrationMismatch


class OscarCodec(TokenBlockCodec):
    """x -> clip(x R H P) on asymmetric grids of `group` coordinates of one token.

    R are, per KV head, the eigenvectors of a second moment, most important first; H is the Walsh-Hadamard
    matrix on head_dim padded to a power of two; P reverses the bits of a coordinate's number, so that a
    group of half the coordinates is no half of the transform. For K the moment is that of the queries,
    Sigma_q = L L^T of the calibrated whitener (whether or not the recipe whitens). For V it is V's own,
    covariance + mean mean^T, or the covariance when the recipe removes the mean; or, as in the paper, that of V
    weighed by attention's scores, so of its outputs, where the recipe follows these. A vector is clamped to the
    int(clip * width)-th smallest of its magnitudes; 1 clips nothing, and is the better choice from 4 bits on.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, recipe: OscarStream, calibration: StreamCalibration | None = None):
        super().__init__(recipe, calibration)
        self._turns: dict[int, Tensor] = {}

    def encode(self, x: Tensor, site: Site) -> Encoded:
        """See `Codec.encode`; `CalibrationMismatch` when what the stream's rotation is made of is missing."""
        if site.stream == "k":
            needed(self.calibration.whiteners, site.layer, "codec: oscar", "whitener")
        return super().encode(x, site)

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes and grids of one block."""
        turned = clamped(product(rows, self._turn(layer, rows.shape).to(rows.device)), self.recipe.clip)
        arrays = uniform.write(turned, self.recipe.group, self.recipe.bits, layer)
        return arrays, Stats(n_coefficients=turned.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """The levels that the codes name, turned back."""
        heads, tokens, head_dim = shape
        wide = (heads, tokens, hadamard_pad.width(head_dim))
        turned = uniform.read(arrays, wide, self.recipe.group, self.recipe.bits)
        return product(turned, self._turn(layer, shape).to(turned.device).mT)

    def _turn(self, layer: int, shape: tuple[int, int, int]) -> Tensor:
        """R H P of a layer, float32 [heads, head_dim, width], with orthonormal rows."""
        if layer not in self._turns:
            self._turns[layer] = turn(self._moment(layer))
        found = self._turns[layer]
        if (shape[0], shape[2]) != tuple(found.shape[:2]):
            raise CalibrationMismatch(
                f"the calibrated rotation is for {found.shape[0]} KV heads of {found.shape[1]} dimensions, the "
                f"tensor has {shape[0]} of {shape[2]}; calibrate this model",
                code="calibration.other-shape",
            )
        return found

    def _moment(self, layer: int) -> Tensor:
        """The second moment that the rotation follows, float64 [heads, head_dim, head_dim]."""
        if layer in self.calibration.whiteners:
            chol = self.calibration.whiteners[layer].chol.double()
            return chol @ chol.mT
        if self.recipe.follow == "outputs":
            return needed(self.calibration.outputs, layer, "follow: outputs", "second moment of outputs").double()
        own = needed(self.calibration.components, layer, "codec: oscar", "covariance")
        mean = torch.zeros_like(own.mean) if self.recipe.center else own.mean
        return own.head_covariance.double() + mean.double()[:, :, None] * mean.double()[:, None, :]


def turn(moment: Tensor) -> Tensor:
    """Eigenvectors by descending eigenvalue, spread by Hadamard, in bit-reversed order."""
    vectors = fixed_sign(torch.linalg.eigh(moment.cpu()).eigenvectors.flip(-1), dim=-2)
    wide = hadamard_pad.width(moment.shape[-1])
    padded = torch.nn.functional.pad(vectors, (0, wide - moment.shape[-1])).float()
    return rotation.hadamard(padded)[..., bit_reversal(wide)] / math.sqrt(wide)


def bit_reversal(wide: int) -> list[int]:
    """0..wide-1 with the bits of each number read backwards."""
    digits = bits_for(wide)
    return [int(format(i, f"0{digits}b")[::-1], 2) if digits else 0 for i in range(wide)]


def clamped(rows: Tensor, ratio: float) -> Tensor:
    """Each row within plus and minus the int(ratio * width)-th smallest of its magnitudes."""
    wide = rows.shape[-1]
    dropped = wide - min(int(ratio * wide), wide - 1)
    if dropped == 1:
        return rows
    limit = rows.abs().topk(dropped, dim=-1).values[..., -1:]
    return torch.minimum(torch.maximum(rows, -limit), limit)
