"""The shape of one component's distribution: a sketch of quantiles."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

POINTS = 256
PSEUDO_SAMPLES = 8192


def ranks(count: int) -> Tensor:
    """Quantiles of N(0, 1) at (i + 1/2) / count, float64 [count]."""
    return torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)


def sketch(samples: Tensor) -> Tensor:
    """Quantiles at (i + 1/2) / POINTS of samples mixed with as many of N(0, 1) as it takes to be sure of a shape.

    A table that is fitted to a thousand correlated tokens is worse on the next thousand than the
    Gaussian one, a table fitted to six thousand is better: hence a prior worth `PSEUDO_SAMPLES`.

    Parameters
    ----------
    samples : Tensor
        [D, n] float64, of variance 1 each.

    Returns
    -------
    Tensor
        [D, POINTS], ascending.
    """
    prior = ranks(PSEUDO_SAMPLES).to(samples).expand(samples.shape[0], -1)
    mixed = torch.cat((samples, prior), dim=1)
    ordered = torch.from_numpy(np.sort(mixed.cpu().numpy(), axis=1)).to(mixed.device)  # several times torch's speed
    place = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS * ordered.shape[1] - 0.5
    low = place.long()
    return torch.lerp(ordered[:, low], ordered[:, low + 1], (place - low).to(ordered))


def gaussian_sketch(count: int) -> Tensor:
    """The sketch of N(0, 1), float64 [count, POINTS]."""
    return ranks(POINTS).expand(count, -1)
