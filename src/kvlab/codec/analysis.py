"""From rows to what is stored about a batch of blocks, up to the residual that is quantised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codec import rotation, shape_gain, transform
from kvlab.codec.skeleton import Centres, Skeleton
from kvlab.codec.stored import Rounding
from kvlab.codec.synthesis import Synthesis
from kvlab.codec.vector_code import Group, Vectors
from kvlab.recipe import BlockStream


@dataclass(frozen=True)
class Analysis:
    """A batch of B blocks of n rows, analysed.

    Parameters
    ----------
    skeleton, centres : Skeleton, Centres
        As stored.
    synthesis : Synthesis
        The same as read back.
    segment, gain, norm : Tensor
        [B, n]; gain and norm in the stored precision.
    unit : Tensor
        Residuals of norm 1, float32 [B, n, W]; 0 where the stored norm is 0.
    """

    skeleton: Skeleton
    centres: Centres
    synthesis: Synthesis
    segment: Tensor
    gain: Tensor
    norm: Tensor
    unit: Tensor

    def vectors(self, group: Group) -> Vectors:
        """The vectors of a group with the rotated residual z, of mean square 1 per coordinate."""
        at = group.index
        z = rotation.rotate(self.unit[at][..., : group.width], self.synthesis.seed)
        return Vectors(self.segment[at], self.gain[at], self.norm[at], z)


def analyse(
    blocks: Tensor, recipe: BlockStream, shared: Skeleton | None, rounding: Rounding, apply_norm: bool
) -> Analysis:
    """Run the chain on blocks [B, n, D], with the call's `shared` skeleton if there is one.

    Raises
    ------
    NonFinite
        When a mean, centre, gain or norm does not fit the stored precision.
    """
    skeleton = shared or Skeleton.store(transform.fit(blocks, recipe), rounding)
    frame = skeleton.read().repeated(len(blocks))
    coefficients = frame.project(blocks)
    directions, counts = shape_gain.spherical_kmeans(
        coefficients, recipe.n_centres, recipe.kmeans_iterations, recipe.seed
    )
    centres = Centres.store(directions, counts, frame, rounding)
    synthesis = Synthesis(frame, centres.read(frame), counts, recipe.seed, apply_norm)
    segment, gain, residual = shape_gain.split(coefficients, synthesis.centres, rounding)
    length = residual.norm(dim=-1)
    norm = rounding(length, "residual norm")
    unit = torch.where((norm > 0)[..., None], residual / length[..., None], 0.0)
    return Analysis(skeleton, centres, synthesis, segment, gain, norm, unit)
