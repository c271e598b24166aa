"""What a batch of blocks stores about its distribution: mean, axes and centres, rounded.

The encoder works with what it reads back from here, so it sees exactly what the decoder will see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codecs.block.stored import Rounding
from kvlab.codecs.shared.transform import Pca


@dataclass(frozen=True)
class Frame:
    """An affine frame per block as stored: the mean and W axes [B, 1 + W, D], of which d_eff are kept.

    Axes beyond d_eff [B] are zero, and not stored.
    """

    values: Tensor
    d_eff: list[int]

    @classmethod
    def store(cls, pca: Pca, rounding: Rounding) -> Frame:
        """Round, and clear the axes beyond d_eff."""
        kept = torch.arange(pca.axes.shape[1], device=pca.d_eff.device) < pca.d_eff[:, None]
        axes = torch.where(kept[..., None], pca.axes, 0.0)
        values = torch.cat((rounding(pca.mean, "mean")[:, None], rounding(axes, "basis")), dim=1)
        return cls(values, pca.d_eff.tolist())

    def project(self, rows: Tensor) -> Tensor:
        """Coefficients [B, n, W] of rows [B, n, D]."""
        values = self.values.float()
        return (rows - values[:, :1]) @ values[:, 1:].mT

    def of(self, block: int) -> Tensor:
        """What is stored of one block [1 + d_eff, D]."""
        return self.values[block, : 1 + self.d_eff[block]]

    def repeated(self, blocks: int) -> Frame:
        """A shared frame once for each block."""
        return Frame(self.values.expand(blocks, -1, -1), self.d_eff * blocks)


@dataclass(frozen=True)
class Centres:
    """Centres as stored [B, K, W], zero beyond the coordinates that are kept, and how many are used."""

    values: Tensor
    counts: list[int]

    @classmethod
    def store(cls, directions: Tensor, counts: Tensor, rounding: Rounding) -> Centres:
        """Round."""
        return cls(rounding(directions, "centre"), counts.tolist())

    def of(self, block: int, rank: int) -> Tensor:
        """What is stored of one block [count, rank]."""
        return self.values[block, : self.counts[block], :rank].contiguous()
