"""NormalFloat of 4 bits: the quantiles of a normal variable as levels, and one scale for every few channels."""

from __future__ import annotations

from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import Arrays, Stats, stored
from kvlab.codecs.shared import fp16, quantizer
from kvlab.codecs.shared.token_blocks import TokenBlockCodec
from kvlab.codecs.shared.uniform import grouped
from kvlab.codecs.stream import packing

BITS = 4
OUTERMOST = (1 - 1 / 32 + 1 - 1 / 30) / 2  # the probability below the largest level, before all are scaled to 1


def levels() -> Tensor:
    """The 16 levels, float32, ascending from -1 to 1 with 0 among them (Dettmers et al. 2023, arXiv 2305.14314, 3).

    Eight lie above zero and seven below it, on each side as many equal steps of probability from zero to the end.
    """
    quantile = NormalDist().inv_cdf
    above = [quantile(0.5 + (OUTERMOST - 0.5) * i / 8) for i in range(1, 9)]
    below = [-quantile(0.5 + (OUTERMOST - 0.5) * i / 7) for i in range(1, 8)]
    return torch.tensor(sorted([*below, 0.0, *above]), dtype=torch.float32) / quantile(OUTERMOST)


class Nf4Codec(TokenBlockCodec):
    """Each value over the largest of its `group` of neighbouring channels, as the nearest of 16 levels.

    Stored are the codes and, per group of one token of one head, its largest magnitude as float16: 4 + 16 / group
    bits per value. (QLoRA codes its scales once more; here they stay as they are.)
    """

    per_token: ClassVar[bool] = True

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes and scales of one block."""
        cells = grouped(rows, self.recipe.group)
        scale = fp16.above(cells.abs().amax(-1), "largest magnitude of a group", layer)
        divisor = torch.where(scale > 0, scale, 1).float()[..., None]
        codes = quantizer.quantise(cells / divisor, levels().to(rows.device)).to(torch.uint8)
        codes = codes.flatten(-2)[..., : rows.shape[-1]]
        return (packing.pack(codes.flatten(), BITS), scale), Stats(n_coefficients=rows.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """The levels that the codes name, scaled."""
        heads, tokens, n = shape
        groups = -(-n // min(self.recipe.group, n))
        size = packing.packed_size(heads * tokens * n, BITS)
        codes, scale = stored(arrays, (torch.uint8, (size,)), (torch.float16, (heads, tokens, groups)))
        table = levels().to(codes.device)
        values = table[packing.unpack(codes, BITS, heads * tokens * n).long()].reshape(shape)
        return (grouped(values, self.recipe.group) * fp16.read(scale)[..., None]).flatten(-2)[..., :n]
