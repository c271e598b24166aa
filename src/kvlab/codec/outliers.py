"""Coefficients beyond a threshold, stored apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

U8_COUNTS = 255
U8_PLACES = 256


@dataclass(frozen=True)
class Outliers:
    """Three parallel arrays, flat over all vectors of a part.

    Parameters
    ----------
    counts : Tensor
        Outliers of each vector, u8 or u16.
    places : Tensor
        Their indices inside their vectors, u8 or u16.
    values : Tensor
        Their values, float16.
    """

    counts: Tensor
    places: Tensor
    values: Tensor


def take(z: Tensor, threshold: float) -> Outliers:
    """The entries of z [vectors, N] with |z| strictly above the threshold.

    Index and count take one byte where N allows it, else two; a vector may be outliers only.
    """
    width = z.shape[-1]
    beyond = z.abs() > threshold
    return Outliers(
        counts=beyond.sum(-1).to(torch.uint8 if width <= U8_COUNTS else torch.uint16),
        places=beyond.nonzero()[:, 1].to(torch.uint8 if width <= U8_PLACES else torch.uint16),
        values=z[beyond].half(),
    )


def restore(z: Tensor, outliers: Outliers) -> Tensor:
    """z [vectors, N] with the outliers put over what was quantised in their places."""
    counts = outliers.counts.long()
    vector = torch.repeat_interleave(torch.arange(len(counts), device=z.device), counts)
    z = z.clone()
    z[vector, outliers.places.long()] = outliers.values.float()
    return z
