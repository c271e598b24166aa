"""Norm, random rotation, optimal scalar quantiser: the codec that any new system has to beat.

The construction of TurboQuant (Zandieh et al. 2025, arXiv 2504.19874) in its MSE form: after a random
rotation the coordinates of a unit vector are nearly Gaussian, so one Lloyd-Max table serves all.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.base.recipe import HadamardStream
from kvlab.codec import quantizer
from kvlab.codec.base import Arrays, Stats, StreamCalibration, stored
from kvlab.codec.ladder import halves, spread
from kvlab.codec.ladder.token_blocks import TokenBlockCodec
from kvlab.codec.stream import packing


class HadamardCodec(TokenBlockCodec):
    """Stores each vector's norm as float16 and `bits` per coordinate of its rotated direction.

    The rotation is D then H: seeded signs, then Walsh-Hadamard on head_dim padded to a power of two.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, recipe: HadamardStream, calibration: StreamCalibration | None = None):
        super().__init__(recipe, calibration)
        self.table = quantizer.gaussian_table(recipe.bits).float()

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes and norms of one block."""
        norm = halves.nearest(rows.norm(dim=-1), "norm", layer)
        divisor = torch.where(norm > 0, norm, 1).float()[..., None]
        z = spread.forward(rows, self.recipe.seed, spread.width(rows.shape[-1])) / divisor
        codes = quantizer.codes(z, self.table.to(rows.device))
        return (packing.pack(codes.flatten(), self.recipe.bits), norm), Stats(n_coefficients=codes.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """Table values, turned back and scaled."""
        heads, tokens, head_dim = shape
        wide, bits = spread.width(head_dim), self.recipe.bits
        count = heads * tokens * wide
        codes, norm = stored(
            arrays, (torch.uint8, (packing.packed_size(count, bits),)), (torch.float16, (heads, tokens))
        )
        z = self.table.to(codes.device)[packing.unpack(codes, bits, count)].reshape(heads, tokens, wide)
        return spread.inverse(z * halves.read(norm)[..., None], self.recipe.seed, head_dim)
