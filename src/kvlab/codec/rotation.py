"""Walsh-Hadamard rotation behind random signs: spreads a vector evenly over its coordinates."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kvlab.codec.seeding import generator


@lru_cache(maxsize=64)
def signs(seed: int, width: int) -> Tensor:
    """The +-1 pattern of a width, float32 [width]; one for all blocks, layers and streams."""
    draw = torch.randint(0, 2, (width,), generator=generator("signs", seed, width))
    return draw.float() * 2 - 1


def hadamard(x: Tensor) -> Tensor:
    """Unnormalised Walsh-Hadamard transform of the last axis in natural (Sylvester) order.

    Parameters
    ----------
    x : Tensor
        [..., N] with N a power of two.

    Returns
    -------
    Tensor
        [..., N]; applied twice it gives N * x, and squared norms grow by N.
    """
    width = x.shape[-1]
    step = 1
    while step < width:
        pairs = x.reshape(-1, width // (2 * step), 2, step)
        left, right = pairs.unbind(2)
        x = torch.stack((left + right, left - right), dim=2).reshape(x.shape)
        step *= 2
    return x


def rotate(x: Tensor, seed: int) -> Tensor:
    """H D x with D the sign pattern; maps a vector of norm 1 to mean square 1 per coordinate."""
    return hadamard(x * signs(seed, x.shape[-1]).to(x.device))


def unrotate(y: Tensor, seed: int) -> Tensor:
    """D H y / N, the inverse of `rotate`."""
    return hadamard(y) * (signs(seed, y.shape[-1]).to(y.device) / y.shape[-1])
