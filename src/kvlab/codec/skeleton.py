"""What a block stores about its distribution: mean, axes and centres, ragged and rounded.

The encoder works with what it reads back from here, so it sees exactly what the decoder will see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codec.stored import Rounding, bits_for, expand, prefix_mask
from kvlab.codec.transform import Pca


@dataclass(frozen=True)
class Frame:
    """An affine frame per block, float32: mean [B, D], axes [B, W, D] (0 beyond d_eff), d_eff [B]."""

    mean: Tensor
    axes: Tensor
    d_eff: Tensor

    def project(self, rows: Tensor) -> Tensor:
        """Coefficients [B, n, W] of rows [B, n, D]."""
        return (rows - self.mean[:, None]) @ self.axes.mT

    def restore(self, coefficients: Tensor) -> Tensor:
        """Rows [B, n, D] of coefficients [B, n, W]."""
        return torch.baddbmm(self.mean[:, None], coefficients, self.axes)

    def at(self, index: Tensor) -> Frame:
        """The frames of some of the blocks."""
        return Frame(self.mean[index], self.axes[index], self.d_eff[index])

    def repeated(self, blocks: int) -> Frame:
        """A shared frame once for each block; a frame per block as it is."""
        if len(self.mean) == blocks:
            return self
        return Frame(*(part.expand(blocks, *part.shape[1:]) for part in (self.mean, self.axes, self.d_eff)))


@dataclass(frozen=True)
class Skeleton:
    """A frame as stored: d_eff u16 [B], mean [B, D], the kept axes one after the other [sum d_eff, D]."""

    d_eff: Tensor
    mean: Tensor
    axes: Tensor

    @classmethod
    def store(cls, pca: Pca, rounding: Rounding) -> Skeleton:
        """Round and drop the axes beyond d_eff."""
        kept = prefix_mask(pca.d_eff, pca.axes.shape[1])
        return cls(
            d_eff=pca.d_eff.to(torch.uint16),
            mean=rounding(pca.mean, "mean"),
            axes=rounding(pca.axes[kept], "basis"),
        )

    def read(self) -> Frame:
        """The frame, padded to the power of two W that holds the largest d_eff."""
        d_eff = self.d_eff.long()
        width = 1 << int(bits_for(d_eff.max()))
        return Frame(self.mean.float(), expand(self.axes, prefix_mask(d_eff, width)), d_eff)


@dataclass(frozen=True)
class Centres:
    """Centres as stored: how many u16 [B], and their d_eff coordinates one after the other."""

    counts: Tensor
    values: Tensor

    @classmethod
    def store(cls, centres: Tensor, counts: Tensor, frame: Frame, rounding: Rounding) -> Centres:
        """Round, and drop centres beyond `counts` [B] and coordinates beyond d_eff of [B, K, W]."""
        kept = cls.mask(counts, frame)
        values = centres[:, : kept.shape[1]][kept]
        return cls(counts=counts.to(torch.uint16), values=rounding(values, "centre"))

    def read(self, frame: Frame) -> Tensor:
        """Centres float32 [B, K, W], 0 where nothing is stored."""
        return expand(self.values, self.mask(self.counts.long(), frame))

    @staticmethod
    def mask(counts: Tensor, frame: Frame) -> Tensor:
        """Where a centre has a stored coordinate: bool [B, K, W]."""
        of_centre = prefix_mask(counts, int(counts.max()))
        return of_centre[:, :, None] & prefix_mask(frame.d_eff, frame.axes.shape[1])[:, None]
