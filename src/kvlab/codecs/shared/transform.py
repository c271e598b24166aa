"""Principal components of each block, exact or from a random sketch, and how many of them to keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvlab.codecs.block import BlockStream
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.seeding import generator

# A mean of float32 numbers is off by a few units in the last place: what is left of a constant block
CONSTANT = (16 * torch.finfo(torch.float32).eps) ** 2

KEPT = 1 << 20  # numbers of a test matrix, 4 MB, up to which it is kept; a shared basis may ask for much more


@dataclass(frozen=True)
class Pca:
    """Mean [blocks, D], axes in descending energy [blocks, k, D], kept rank [blocks]."""

    mean: Tensor
    axes: Tensor
    d_eff: Tensor


def fit(rows: Tensor, recipe: BlockStream) -> Pca:
    """Principal components of each block of [blocks, n, D], float32.

    ``exact`` may keep up to D components, or up to ``exact_rank_cap``; ``randomized`` up to
    ``max(2, int(D * rank_fraction))``, and there the cap is not looked at. Neither keeps more than a block
    has rows. The sign of an axis makes its largest entry positive.
    """
    _, count, dim = rows.shape
    rows, scale = to_unit_size(rows.float())
    mean = rows.mean(dim=1)
    centred = rows - mean[:, None]
    gram = centred.mT @ centred
    if recipe.pca == "exact":
        rank = min(dim, count)
        energy, axes = descending_eigh(gram)
    else:
        rank = min(max(2, int(dim * recipe.rank_fraction)), dim, count)
        width = min(rank + recipe.oversample, dim, count)
        start = centred.mT @ probe(recipe.seed, count, width).to(rows.device)
        energy, axes = subspace_eigh(gram, start, recipe.power_iterations)
    size = gram.diagonal(dim1=1, dim2=2).sum(-1) + count * mean.square().sum(-1)
    d_eff = effective_rank(energy, recipe.variance_ratio, rank, CONSTANT * size)
    if recipe.pca == "exact" and recipe.exact_rank_cap is not None:
        d_eff = d_eff.clamp(max=recipe.exact_rank_cap)
    return Pca(mean / scale, axes[:, : int(d_eff.max())], d_eff)


def to_unit_size(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each block of [blocks, n, D] times the power of two [blocks, 1] that brings its largest number to 1..2.

    Squares of any float32 numbers then neither overflow nor vanish, and no other bit changes.
    """
    peak = rows.abs().amax(dim=(1, 2))
    scale = torch.exp2((1 - torch.frexp(peak).exponent.clamp(-120, 120)).float())[:, None]
    return rows * scale[:, None], scale


def effective_rank(energy: Tensor, ratio: float, rank: int, floor: Tensor) -> Tensor:
    """How many components carry `ratio` of the energy that is given.

    Parameters
    ----------
    energy : Tensor
        Descending energies [blocks, r]. All D of them make the ratio relative to the total
        variance; the r of a sketch make it relative to what the sketch retained.
    ratio : float
        In (0, 1]; 1 keeps `rank` components.
    rank : int
        Upper limit.
    floor : Tensor
        [blocks]; a block whose energy is not above it has no direction, and keeps 1 component.

    Returns
    -------
    Tensor
        int64 [blocks], each in 1..rank.
    """
    energy = energy.clamp(min=0)
    total = energy.sum(-1)
    if ratio < 1:
        needed = (energy.cumsum(-1) < ratio * total[:, None]).sum(-1) + 1
    else:
        needed = torch.full_like(total, rank, dtype=torch.int64)
    return torch.where(total > floor, needed, 1).clamp(1, rank)


def descending_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and eigenvectors as rows with a fixed sign, of [blocks, D, D]."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(-1), fixed_sign(vectors.flip(-1).mT)


def subspace_eigh(gram: Tensor, start: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """The leading eigenpairs of `gram` inside the range of gram^iterations @ start.

    Halko, Martinsson and Tropp (2011), algorithm 4.4, with start = A^T Omega. A enters only through
    gram = A^T A, since span(A^T orth(A Z)) = span(gram Z); the singular values of A Q squared are
    the eigenvalues of Q^T gram Q. Between two iterations the lower factor of an LU decomposition stands
    for the orthonormal basis of the same space (Li et al. 2017, algorithm 971): it always has full rank
    and is well conditioned, and small LU and Cholesky factors cost a tenth of a QR decomposition.

    Parameters
    ----------
    gram : Tensor
        [blocks, D, D].
    start : Tensor
        [blocks, D, r].
    iterations : int
        Power iterations.
    """
    for _ in range(iterations):
        start = gram @ lower_basis(start)
    basis = orthonormal(lower_basis(start))
    energy, inner = descending_eigh(basis.mT @ gram @ basis)
    return energy, fixed_sign(inner @ basis.mT)


def lower_basis(columns: Tensor) -> Tensor:
    """A basis of the span of `columns` [blocks, D, r], completed to r columns where they are dependent."""
    order, lower, _ = torch.linalg.lu(columns)
    return order @ lower


def orthonormal(basis: Tensor) -> Tensor:
    """Orthonormal columns with the span of a well-conditioned `basis`: B C^-T with C C^T = B^T B, in float64."""
    wide = basis.double()
    factor = torch.linalg.cholesky(wide.mT @ wide)
    return torch.linalg.solve_triangular(factor.mT, wide, upper=True, left=False).to(basis.dtype)


def probe(seed: int, count: int, width: int) -> Tensor:
    """The random test matrix Omega [count, width], the same for every block of that size; kept unless it is large."""
    return (kept_probe if count * width <= KEPT else drawn_probe)(seed, count, width)


def drawn_probe(seed: int, count: int, width: int) -> Tensor:
    """`probe`, drawn anew."""
    return torch.randn(count, width, generator=generator("sketch", seed), dtype=torch.float32)


kept_probe = lru_cache(maxsize=4)(apart(drawn_probe))


def fixed_sign(axes: Tensor, dim: int = -1) -> Tensor:
    """Turn each axis, along `dim`, so that its entry of largest magnitude is positive.

    The sign of an eigenvector is free; so fixed, equal rows give equal axes.
    """
    largest = axes.abs().argmax(dim, keepdim=True)
    return axes * torch.where(axes.gather(dim, largest) < 0, -1.0, 1.0)
