"""KIVI (Liu et al. 2024, arXiv 2402.02750): K has outlier channels, so its groups run along tokens."""

from __future__ import annotations

from torch import Tensor

from kvlab.codecs.base import Arrays, Stats, StreamCalibration
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.shared import uniform
from kvlab.codecs.shared.token_blocks import TokenBlockCodec


class KiviCodec(TokenBlockCodec):
    """Asymmetric grids: ``axis: channel`` groups the tokens of a channel, ``axis: token`` the channels of a token.

    The paper uses the first for K and the second for V, and keeps the last tokens in 16 bits until a
    group is full; here a group that the block cuts short has a grid of its own instead, so that every
    token is coded. Stored are codes and, per group, minimum and step as float16.
    """

    def __init__(self, recipe: KiviStream, calibration: StreamCalibration | None = None):
        super().__init__(recipe, calibration)
        self.per_token = recipe.axis == "token"

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes and grids of one block."""
        rows = rows if self.per_token else rows.mT.contiguous()
        arrays = uniform.write(rows, self.recipe.group, self.recipe.bits, layer)
        return arrays, Stats(n_coefficients=rows.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """The levels that the codes name."""
        heads, tokens, head_dim = shape
        grouped = shape if self.per_token else (heads, head_dim, tokens)
        rows = uniform.read(arrays, grouped, self.recipe.group, self.recipe.bits)
        return rows if self.per_token else rows.mT
