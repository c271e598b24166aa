"""Lloyd-Max scalar quantisers: the table of N(0, 1), tables fitted to samples, and their use."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from kvlab.codecs.shared.apart import apart
from kvlab.core.errors import NonFinite, StorageError

FAR = 40.0  # the Gaussian density is zero in float64 from here on
ROUNDS, TOLERANCE = 200, 1e-6
FEW = 15  # boundaries up to which comparing with each is faster than bisection


def density(x: Tensor) -> Tensor:
    """Density of N(0, 1)."""
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


@lru_cache(maxsize=8)
@apart
def gaussian_table(bits: int) -> Tensor:
    """The optimal 2**bits reconstruction values of N(0, 1), ascending, float64.

    Solves the fixed point of Lloyd (1982) and Max (1960), value = mean of its cell, with exact
    integrals. Newton's method on the positive half (the cell means depend on neighbours only, so
    the Jacobian is tridiagonal), started from the companding density f^(1/3), N(0, 3).
    """
    half = 2 ** (bits - 1)
    ranks = (torch.arange(half, dtype=torch.float64) + 0.5) / (2 * half) + 0.5
    values = torch.special.ndtri(ranks) * math.sqrt(3)
    for _ in range(100):
        means, jacobian = cell_means(values)
        step = torch.linalg.solve(torch.eye(half, dtype=torch.float64) - jacobian, means - values)
        values = values + step
        if step.abs().max() < 1e-13:
            break
    return torch.cat((-values.flip(0), values))


def cell_means(values: Tensor) -> tuple[Tensor, Tensor]:
    """Means of the N(0, 1) cells around positive `values` [m], and their derivative [m, m]."""
    middle = (values[1:] + values[:-1]) / 2
    low = torch.cat((torch.zeros(1, dtype=values.dtype), middle))
    high = torch.cat((middle, torch.full((1,), FAR, dtype=values.dtype)))
    mass = (torch.erfc(low / math.sqrt(2)) - torch.erfc(high / math.sqrt(2))) / 2
    means = (density(low) - density(high)) / mass
    by_low = (density(low) * (means - low) / mass / 2)[1:]
    by_high = (density(high) * (high - means) / mass / 2)[:-1]
    jacobian = torch.diag(by_low, -1) + torch.diag(by_high, 1)
    jacobian.diagonal()[1:] += by_low
    jacobian.diagonal()[:-1] += by_high
    return means, jacobian


def mse(table: Tensor) -> float:
    """Mean squared error of a table on N(0, 1), in closed form."""
    table = table.double().cpu()
    far = torch.full((1,), FAR, dtype=torch.float64)
    edges = torch.cat((-far, boundaries(table), far))
    low, high = edges[:-1], edges[1:]
    mass = torch.special.ndtr(high) - torch.special.ndtr(low)
    first = density(low) - density(high)
    second = mass + low * density(low) - high * density(high)
    return (second - 2 * table * first + table.square() * mass).sum().item()


def fit(samples: Tensor, bits: int) -> Tensor:
    """A table fitted to samples by Lloyd's iteration, started from the Gaussian table.

    Sorted samples and their running sum turn every cell mean into two look-ups. An empty cell keeps
    its value. Stops when no value moves by 1e-6, or after 200 rounds.

    Parameters
    ----------
    samples : Tensor
        Any shape; float64 inside.
    bits : int
        1..8.

    Returns
    -------
    Tensor
        Ascending float32 [2**bits].

    Raises
    ------
    NonFinite
        When a sample is NaN or infinite.
    StorageError
        When there are no samples.
    """
    ordered = samples.detach().flatten().double().cpu().sort().values
    if ordered.numel() == 0:
        raise StorageError(
            "there are no samples to fit a codebook on; use more calibration windows", code="storage.no-samples"
        )
    if not torch.isfinite(ordered).all():
        raise NonFinite("the samples of a codebook hold NaN or infinity")
    running = torch.cat((torch.zeros(1, dtype=torch.float64), ordered.cumsum(0)))
    table = gaussian_table(bits)
    for _ in range(ROUNDS):
        cut = torch.searchsorted(ordered, boundaries(table), right=True)
        cut = torch.cat((torch.zeros(1, dtype=torch.int64), cut, torch.tensor([ordered.numel()])))
        count, total = cut.diff(), running[cut].diff()
        renewed = torch.where(count > 0, total / count.clamp(min=1), table).sort().values
        moved = (renewed - table).abs().max()
        table = renewed
        if moved < TOLERANCE:
            break
    return table.float()


def boundaries(table: Tensor) -> Tensor:
    """Midpoints between neighbours of an ascending table."""
    return (table[1:] + table[:-1]) / 2


def codes(z: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest value of at most 256, the lower one on a tie; uint8, the shape of `z`."""
    edges = boundaries(table)
    if len(edges) > FEW:
        return torch.bucketize(z, edges, out_int32=True).to(torch.uint8)
    index = torch.zeros_like(z, dtype=torch.uint8)
    for edge in edges:  # a count of the boundaries below: a few passes over bytes beat a search per number
        index += z > edge
    return index


def quantise(z: Tensor, table: Tensor) -> Tensor:
    """`codes` as int64, to index with."""
    return codes(z, table).long()
