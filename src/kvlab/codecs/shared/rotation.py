"""Walsh-Hadamard rotation after random signs: spreads a vector evenly over its coordinates."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.products import product
from kvlab.codecs.shared.seeding import generator

DENSE = 256


@lru_cache(maxsize=64)
@apart
def signs(seed: int, width: int) -> Tensor:
    """The +-1 pattern of a width, float32 [width]; one for all blocks, layers and streams."""
    draw = torch.randint(0, 2, (width,), generator=generator("signs", seed, width))
    return draw.float() * 2 - 1


@lru_cache(maxsize=64)
@apart
def sylvester(width: int, device: torch.device) -> Tensor:
    """The Walsh-Hadamard matrix of Sylvester's construction, float32 [width, width]; symmetric, entries +-1."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def hadamard(x: Tensor) -> Tensor:
    """Unnormalised Walsh-Hadamard transform of the last axis in natural (Sylvester) order.

    One product with the matrix is several times faster than log2(N) passes of butterflies over memory; a row's
    numbers do not depend on how many others there are (`product`). Beyond `DENSE` coordinates the matrix is the
    Kronecker product of two, and each is applied by itself.

    Parameters
    ----------
    x : Tensor
        float32 [..., N] with N a power of two.

    Returns
    -------
    Tensor
        [..., N]; applied twice it gives N * x, and squared norms grow by N.
    """
    width = x.shape[-1]
    if width <= DENSE:
        return product(x.reshape(-1, width), sylvester(width, x.device).to(x.dtype)).view(x.shape)
    across = hadamard(x.unflatten(-1, (-1, DENSE)).mT.contiguous()).mT
    rows = across.reshape(-1, DENSE)
    return product(rows, sylvester(DENSE, x.device).to(x.dtype)).view(across.shape).flatten(-2)


def rotate(x: Tensor, seed: int) -> Tensor:
    """H D x with D the sign pattern; maps a vector of norm 1 to mean square 1 per coordinate."""
    return hadamard(x * signs(seed, x.shape[-1]).to(x.device))


def unrotate(y: Tensor, seed: int) -> Tensor:
    """D H y / N, the inverse of `rotate`."""
    return hadamard(y) * (signs(seed, y.shape[-1]).to(y.device) / y.shape[-1])


@lru_cache(maxsize=64)
@apart
def forward(seed: int, width: int, device: torch.device) -> Tensor:
    """`rotate` as a matrix, float32 [width, width]: ``rotate(x) == x @ forward``."""
    return rotate(torch.eye(width, dtype=torch.float32, device=device), seed)


@lru_cache(maxsize=64)
@apart
def inverse(seed: int, width: int, device: torch.device) -> Tensor:
    """`unrotate` as a matrix, float32 [width, width]: ``unrotate(y) == y @ inverse``."""
    return unrotate(torch.eye(width, dtype=torch.float32, device=device), seed)
