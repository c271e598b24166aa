"""TurboQuant (Zandieh et al. 2025, arXiv 2504.19874) in its MSE form, as vLLM 0.32 runs it on K.

vLLM's presets (`turboquant_4bit_nc`, `turboquant_k3v4_nc`, `turboquant_3bit_nc`) rotate K by the Walsh-Hadamard matrix
alone, without random signs, and make the read-back direction a unit vector again ("norm correction"). Their V is
no TurboQuant at all: it is rounded to an even grid per token, which `int` does with a head as its group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.shared import hadamard_pad, rotation
from kvlab.codecs.shared.normed import NormedCodec


class TurboQuantCodec(NormedCodec):
    """Stores each vector's norm as float16 and `bits` per coordinate of its direction after Walsh-Hadamard.

    A vector c of table values stands for the direction H c / |H c|; without `norm_correction` for H c as it is, which
    is shorter than a unit vector in the mean, since a Lloyd-Max table shrinks.
    """

    def turned(self, rows: Tensor, norm: Tensor) -> Tensor:
        """See `NormedCodec.turned`."""
        missing = hadamard_pad.width(rows.shape[-1]) - rows.shape[-1]
        return rotation.hadamard(torch.nn.functional.pad(rows / norm, (0, missing)))

    def turned_back(self, z: Tensor, norm: Tensor, head_dim: int) -> Tensor:
        """See `NormedCodec.turned_back`; the direction is made a unit vector first, if asked for."""
        wide = z.shape[-1]
        scale = z.norm(dim=-1, keepdim=True) / wide**0.5 if self.recipe.norm_correction else 1.0
        return (rotation.hadamard(z / scale) / wide * norm)[..., :head_dim]
