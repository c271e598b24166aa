"""From rows to what is stored about a batch of blocks, up to the residual that is quantised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codecs.block import BlockStream, shape_gain
from kvlab.codecs.block.skeleton import Centres, Frame
from kvlab.codecs.block.stored import Rounding
from kvlab.codecs.shared import transform


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
