"""TurboQuant (Zandieh et al. 2025, arXiv 2504.19874) in its MSE form, as vLLM 0.32 runs it on K.

vLLM's presets (`turboquant_4bit_nc`, `turboquant_k3v4_nc`, `turboquant_3bit_nc`) rotate K by the Walsh-Hadamard matrix
alone, without random signs, and make the read-back direction a unit vector again ("norm correction"). Their V is
no TurboQuant at all: it is rounded to an even grid per token, which `int` does with a head as its group.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.base.recipe import TurboQuantStream
from kvlab.codec import quantizer, rotation
from kvlab.codec.base import Arrays, Stats, StreamCalibration, stored
from kvlab.codec.ladder import halves, spread
from kvlab.codec.ladder.token_blocks import TokenBlockCodec
from kvlab.codec.stream import packing


class TurboQuantCodec(TokenBlockCodec):
    """Stores each vector's norm as float16 and `bits` per coordinate of its direction after Walsh-Hadamard.

    A vector c of table values stands for the direction H c / |H c|; without `norm_correction` for H c as it is, which
    is shorter than a unit vector in the mean, since a Lloyd-Max table shrinks.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, recipe: TurboQuantStream, calibration: StreamCalibration | None = None):
        super().__init__(recipe, calibration)
        self.table = quantizer.gaussian_table(recipe.bits).float()

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes and norms of one block."""
        norm = halves.nearest(rows.norm(dim=-1), "norm", layer)
        divisor = torch.where(norm > 0, norm, 1).float()[..., None]
        wide = spread.width(rows.shape[-1])
        z = rotation.hadamard(torch.nn.functional.pad(rows / divisor, (0, wide - rows.shape[-1])))
        codes = quantizer.codes(z, self.table.to(rows.device))
        return (packing.pack(codes.flatten(), self.recipe.bits), norm), Stats(n_coefficients=codes.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """Table values, made a direction, turned back and scaled."""
        heads, tokens, head_dim = shape
        wide, bits = spread.width(head_dim), self.recipe.bits
        count = heads * tokens * wide
        codes, norm = stored(
            arrays, (torch.uint8, (packing.packed_size(count, bits),)), (torch.float16, (heads, tokens))
        )
        z = self.table.to(codes.device)[packing.unpack(codes, bits, count).long()].reshape(heads, tokens, wide)
        scale = z.norm(dim=-1, keepdim=True) / wide**0.5 if self.recipe.norm_correction else 1.0
        return (rotation.hadamard(z / scale) / wide * halves.read(norm)[..., None])[..., :head_dim]
