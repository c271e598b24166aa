"""Coefficients beyond a threshold, stored apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.core.errors import StreamError

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


def dtypes(width: int) -> tuple[torch.dtype, torch.dtype]:
    """Types of count and index for vectors of `width`: one byte where it suffices, else two.

    A vector may be outliers only, so the count needs one value more than the index.
    """
    count = torch.uint8 if width <= U8_COUNTS else torch.uint16
    place = torch.uint8 if width <= U8_PLACES else torch.uint16
    return count, place


def take(z: Tensor, threshold: float) -> Outliers:
    """The entries of z [vectors, N] with |z| strictly above the threshold."""
    width = z.shape[-1]
    count, place = dtypes(width)
    flat = z.flatten()
    beyond = (flat.abs() > threshold).nonzero().flatten()
    vector = beyond.div(width, rounding_mode="floor")
    return Outliers(
        counts=torch.bincount(vector, minlength=len(z)).to(count),
        places=(beyond - vector * width).to(place),
        values=flat.index_select(0, beyond).half(),
    )


def restore(z: Tensor, outliers: Outliers) -> Tensor:
    """z [vectors, N] with the outliers put over what was quantised in their places.

    Raises
    ------
    StreamError
        When counts and places cannot be those of `z`.
    """
    count, width = z.shape
    counts, places = outliers.counts.long(), outliers.places.long()
    if int(counts.sum()) != len(places) or (len(places) and int(places.max()) >= width):
        raise StreamError(
            f"{len(places)} outliers of vectors of {width} values do not fit their counts or their places"
        )
    vector = torch.repeat_interleave(torch.arange(count, device=z.device), counts, output_size=len(places))
    return z.flatten().index_put((vector * width + places,), outliers.values.float()).view_as(z)
