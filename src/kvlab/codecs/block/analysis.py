"""From rows to what is stored about a batch of blocks, up to the residual that is quantised.

Mean, axes and centres are rounded first, and the rest is made with what is read back of them: the encoder sees exactly
what the decoder will see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codecs.block import BlockStream, shape_gain
from kvlab.codecs.block.stored import Rounding
from kvlab.codecs.shared import transform
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


@dataclass(frozen=True)
class Analysis:
    """A batch of B blocks of n rows, analysed.

    Parameters
    ----------
    frame, centres : Frame, Centres
        As stored.
    segment : Tensor
        int64 [B, n].
    scalars : Tensor
        Gains and residual norms in the stored precision [B, 2, n].
    unit : Tensor
        Residuals of norm 1, float32 [B, n, W]; 0 where the stored norm is 0.
    """

    frame: Frame
    centres: Centres
    segment: Tensor
    scalars: Tensor
    unit: Tensor


def analyse(blocks: Tensor, recipe: BlockStream, shared: Frame | None, rounding: Rounding) -> Analysis:
    """Run the chain on blocks [B, n, D], with the call's `shared` frame if there is one.

    Raises
    ------
    NonFinite
        When a mean, centre, gain or norm does not fit the stored precision.
    """
    frame = shared.repeated(len(blocks)) if shared else Frame.store(transform.fit(blocks, recipe), rounding)
    coefficients = frame.project(blocks)
    directions, counts = shape_gain.spherical_kmeans(
        coefficients, recipe.n_centres, recipe.kmeans_iterations, recipe.seed
    )
    centres = Centres.store(directions, counts, rounding)
    segment, gain, residual = shape_gain.split(coefficients, centres.values.float(), rounding)
    length = torch.linalg.vector_norm(residual, dim=-1)
    norm = rounding(length, "residual norm")
    scale = torch.where(norm > 0, length.reciprocal(), 0.0)
    return Analysis(frame, centres, segment, torch.stack((gain, norm), dim=1), residual * scale[..., None])
