"""How many bits each component gets, and each vector of a cache: reverse water-filling in whole bits."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.shared.quantizer import gaussian_table, mse
from kvlab.core.codec_settings import MOST_BITS

LEAST = 1 / 8  # bits per value that every vector keeps, whatever its loss is thought to be


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


def shared(variances: Tensor, total: int) -> Tensor:
    """Bits of vectors that share a budget, as their components' Gaussian tables would spend it, int64 [V].

    One more bit goes to the vector whose next component gains most by it, but for `LEAST`. Losses of different vectors
    must be in one unit: the metrics that components were fitted in make them so (`calibration.losses`).

    Parameters
    ----------
    variances : Tensor
        Of the components of each vector [V, D].
    total : int
        Bits of all vectors together; 0..V * D * W.
    """
    vectors, dim = variances.shape
    errors = [1.0] + [mse(gaussian_table(width)) for width in range(1, MOST_BITS + 1)]
    errors = torch.tensor(errors, dtype=torch.float32).double()
    gains = (variances.double().cpu()[..., None] * -errors.diff()).flatten(1).sort(dim=1, descending=True).values
    gains[:, : min(int(dim * LEAST), total // vectors)] = torch.inf
    best = gains.flatten().argsort(descending=True, stable=True)[:total]
    return torch.bincount(best // gains.shape[1], minlength=vectors)
