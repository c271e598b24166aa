"""What codecs share that store each vector's norm and, of its direction, a table's code for each coordinate."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import Arrays, Stats, StreamCalibration, stored
from kvlab.codecs.shared import fp16, hadamard_pad, quantizer
from kvlab.codecs.shared.token_blocks import TokenBlockCodec
from kvlab.codecs.stream import packing


class NormedCodec(TokenBlockCodec):
    """Norms as float16, and `bits` per coordinate in a Gaussian Lloyd-Max table.

    A codec says which axes: head_dim is padded to a power of two there.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, recipe, calibration: StreamCalibration | None = None):
        super().__init__(recipe, calibration)
        self.table = quantizer.gaussian_table(recipe.bits).float()

    @abstractmethod
    def turned(self, rows: Tensor, norm: Tensor) -> Tensor:
        """Rows [heads, tokens, head_dim] over their norm [heads, tokens, 1], in the axes of the table."""

    @abstractmethod
    def turned_back(self, z: Tensor, norm: Tensor, head_dim: int) -> Tensor:
        """Table values [heads, tokens, width] as rows of that norm."""

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes and norms of one block."""
        norm = fp16.nearest(rows.norm(dim=-1), "norm", layer)
        z = self.turned(rows, torch.where(norm > 0, norm, 1).float()[..., None])
        codes = quantizer.codes(z, self.table.to(rows.device))
        return (packing.pack(codes.flatten(), self.recipe.bits), norm), Stats(n_coefficients=codes.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """Table values, turned back and scaled."""
        heads, tokens, head_dim = shape
        wide, bits = hadamard_pad.width(head_dim), self.recipe.bits
        count = heads * tokens * wide
        codes, norm = stored(
            arrays, (torch.uint8, (packing.packed_size(count, bits),)), (torch.float16, (heads, tokens))
        )
        z = self.table.to(codes.device)[packing.unpack(codes, bits, count)].reshape(heads, tokens, wide)
        return self.turned_back(z, fp16.read(norm)[..., None], head_dim)
