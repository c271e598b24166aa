"""Moments of neighbouring layers together, folded up as they come."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Across:
    """Moments of K and V of one layer together with those of the layer below: what prediction is fitted on.

    Parameters
    ----------
    width : int
        kv_heads * head_dim.
    below : bool
        Whether there is a layer below.

    Attributes
    ----------
    count : float
    mean : Tensor
        float64 [parts * width]: K and V below where there are any, then K and V.
    scatter : Tensor
        Sum of the outer products about the mean, float64 [parts * width, parts * width].
    largest : Tensor
        Largest magnitude of the layer's own K and V, float64 [2].
    """

    def __init__(self, width: int, below: bool):
        size = (4 if below else 2) * width
        self.width, self.count = width, 0.0
        self.mean = torch.zeros(size, dtype=torch.float64)
        self.scatter = torch.zeros(size, size, dtype=torch.float64)
        self.largest = torch.zeros(2, dtype=torch.float64)

    def update(self, rows: Sequence[Tensor]) -> None:
        """Fold in rows of each part, float [tokens, width]; products in float32, sums in float64.

        Folded as Chan, Golub and LeVeque (1979) do.
        """
        joined = torch.cat([part.float().cpu() for part in rows], dim=1)
        mean = joined.double().mean(0)
        centred = joined - mean.float()
        count, apart = float(len(joined)), mean - self.mean
        total = self.count + count
        self.scatter += (centred.mT @ centred).double() + self.count * count / total * torch.outer(apart, apart)
        self.mean += apart * (count / total)
        self.count = total
        own = joined[:, -2 * self.width :].abs().double().unflatten(1, (2, -1)).amax((0, 2))
        self.largest = torch.maximum(self.largest, own)
