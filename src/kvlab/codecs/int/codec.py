"""Round to nearest in groups of channels: what most engines mean by an integer cache."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from kvlab.codecs.base import Arrays, Stats
from kvlab.codecs.shared import uniform
from kvlab.codecs.shared.token_blocks import TokenBlockCodec


class IntCodec(TokenBlockCodec):
    """An asymmetric grid for every `group` neighbouring channels of one token of one head.

    Stored are the codes and, per group, minimum and step as float16: bits + 32 / group per value.
    """

    per_token: ClassVar[bool] = True

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes and grids of one block."""
        arrays = uniform.write(rows, self.recipe.group, self.recipe.bits, layer)
        return arrays, Stats(n_coefficients=rows.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """The levels that the codes name."""
        return uniform.read(arrays, shape, self.recipe.group, self.recipe.bits)
