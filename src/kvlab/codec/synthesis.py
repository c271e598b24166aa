"""From what is stored to rows: shared by the decoder and by the encoder's own bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvlab.codec import rotation, shape_gain
from kvlab.codec.skeleton import Centres, Frame, Skeleton
from kvlab.codec.vector_code import Group, Vectors, groups


@dataclass(frozen=True)
class Synthesis:
    """What the decoder knows about a batch of blocks, and what it makes of their vectors.

    Parameters
    ----------
    frame : Frame
        Mean, axes, d_eff of each block.
    centres : Tensor
        float32 [B, K, W].
    n_centres : Tensor
        int64 [B].
    seed : int
        Of the rotation.
    apply_norm : bool
        False drops the residual's norm, as the published decoder did.
    """

    frame: Frame
    centres: Tensor
    n_centres: Tensor
    seed: int
    apply_norm: bool

    @classmethod
    def read(cls, skeleton: Skeleton, centres: Centres, seed: int, apply_norm: bool) -> Synthesis:
        """From the stored skeleton (its own per block, or one for all) and centres."""
        frame = skeleton.read().repeated(len(centres.counts))
        return cls(frame, centres.read(frame), centres.counts.long(), seed, apply_norm)

    def groups(self) -> list[Group]:
        """The blocks by the stored size of their vectors."""
        return groups(self.frame.d_eff, self.n_centres)

    def rows(self, group: Group, vectors: Vectors) -> Tensor:
        """Decoded rows [b, n, D] of a group: mean + axes^T (gain * centre + norm * D H z / N)."""
        residual = rotation.unrotate(vectors.z, self.seed)
        if self.apply_norm:
            residual = residual * vectors.norm.float()[..., None]
        centres = self.centres[group.index]
        beyond = centres.shape[-1] - group.width
        coefficients = shape_gain.predict(centres, vectors.segment, vectors.gain) + pad(residual, (0, beyond))
        return self.frame.at(group.index).restore(coefficients)

    def assemble(self, parts: list[Tensor]) -> Tensor:
        """The rows of all groups back in the order of the blocks, [B, n, D]."""
        order = torch.cat([group.index for group in self.groups()])
        return torch.cat(parts)[torch.argsort(order)]
