"""Norm, random rotation, optimal scalar quantiser: the codec that any new system has to beat.

The construction of TurboQuant (Zandieh et al. 2025, arXiv 2504.19874) in its MSE form: after a random
rotation the coordinates of a unit vector are nearly Gaussian, so one Lloyd-Max table serves all.
"""

from __future__ import annotations

from torch import Tensor

from kvlab.codecs.shared import hadamard_pad
from kvlab.codecs.shared.normed import NormedCodec


class HadamardCodec(NormedCodec):
    """Stores each vector's norm as float16 and `bits` per coordinate of its rotated direction.

    The rotation is D then H: seeded signs, then Walsh-Hadamard on head_dim padded to a power of two.
    """

    def turned(self, rows: Tensor, norm: Tensor) -> Tensor:
        """See `NormedCodec.turned`."""
        return hadamard_pad.forward(rows, self.recipe.seed, hadamard_pad.width(rows.shape[-1])) / norm

    def turned_back(self, z: Tensor, norm: Tensor, head_dim: int) -> Tensor:
        """See `NormedCodec.turned_back`."""
        return hadamard_pad.inverse(z * norm, self.recipe.seed, head_dim)
