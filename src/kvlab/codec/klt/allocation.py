"""How many bits each component gets: reverse water-filling in whole bits."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.base.errors import CapabilityError
from kvlab.base.recipe import MOST_BITS


def spending_order(distortion: Tensor) -> Tensor:
    """Components in the order in which bits are best spent on them, int64 [D * W].

    Each bit goes where it lowers the total distortion most. That is optimal for every total at once when
    each further bit of a component gains less than the one before (Fox 1966; in the large it is the reverse
    water-filling of Kolmogorov 1956): then no exchange of two bits can gain. Where a fitted table breaks
    that rule by a hair the gain is cut down to the one before, which keeps the order of a component's own bits.

    Parameters
    ----------
    distortion : Tensor
        Squared error of each component with 0..W bits [D, W + 1].
    """
    gain = -distortion.double().diff(dim=1).cpu()
    gain = gain.cummin(dim=1).values
    return gain.flatten().argsort(descending=True, stable=True) // gain.shape[1]


def in_turn(components: int) -> Tensor:
    """Components in turn, a bit each, again and again: the order that gives all of them the same, int64."""
    return torch.arange(components).repeat(MOST_BITS)


def bits_of(order: Tensor, total: int, components: int) -> Tensor:
    """Bits of each component when the first `total` of a spending order are spent, int64 [components]."""
    return torch.bincount(order[:total], minlength=components)


def reverse_water_filling(distortion: Tensor, total: int) -> Tensor:
    """Whole bits per component that minimise the total distortion, int64 [D], summing to `total` exactly.

    Parameters
    ----------
    distortion : Tensor
        Squared error of each component with 0..W bits, convex and decreasing along the last axis [D, W + 1].
    total : int
        0..D * W.

    Raises
    ------
    CapabilityError
        When the tables cannot take that many bits.
    """
    components, most = distortion.shape[0], distortion.shape[0] * (distortion.shape[1] - 1)
    if not 0 <= total <= most:
        raise CapabilityError(f"{total} bits cannot be spent on {components} components; allowed: 0..{most}")
    return bits_of(spending_order(distortion), total, components)
