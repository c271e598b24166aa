"""Shape-gain split: a few directions per block, and each vector's signed length along the nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.block.stored import Rounding
from kvlab.codecs.shared.seeding import generator

TINY = 1e-12


def spherical_kmeans(rows: Tensor, n_centres: int, iterations: int, seed: int) -> tuple[Tensor, Tensor]:
    """Unit directions that the rows of each block gather around, up to sign.

    Spherical k-means (Dhillon and Modha 2001) with |cosine| in the assignment and sign-aligned
    means, started farthest-first (Gonzalez 1985) on the signed cosine from a seeded row. An empty
    cluster keeps its centre; a block stops when none of its assignments changes.

    Parameters
    ----------
    rows : Tensor
        float32 [blocks, n, W].
    n_centres : int
        Centres at most; a block never has more than it has rows that are not zero.
    iterations : int
        Lloyd rounds at most.
    seed : int
        Chooses the first row.

    Returns
    -------
    centres : Tensor
        float32 [blocks, K, W] with K = min(n_centres, n); unused ones are zero.
    counts : Tensor
        int64 [blocks]: used centres, at least 1.
    """
    norm = rows.norm(dim=-1, keepdim=True)
    valid = norm[..., 0] > TINY
    unit = torch.where(valid[..., None], rows / norm.clamp(min=TINY), 0.0)
    counts = valid.sum(-1).clamp(1, n_centres)
    centres = farthest_first(unit, valid, min(n_centres, rows.shape[1]), seed)
    centres = torch.where(
        torch.arange(centres.shape[1], device=rows.device)[:, None] < counts[:, None, None], centres, 0.0
    )
    return lloyd(unit, centres, iterations), counts


def farthest_first(unit: Tensor, valid: Tensor, n_centres: int, seed: int) -> Tensor:
    """Start centres [B, n_centres, W]: a seeded row, then always the row least like those chosen."""
    draw = torch.rand(unit.shape[1], generator=generator("kmeans", seed), dtype=torch.float32).to(unit.device)
    chosen = torch.where(valid, draw, -1.0).argmax(-1)
    blocks = torch.arange(len(unit), device=unit.device)
    likeness = torch.where(valid, -2.0, 2.0)
    centres = [unit[blocks, chosen]]
    for _ in range(n_centres - 1):
        cosine = torch.bmm(centres[-1][:, None], unit.mT)[:, 0]
        likeness = torch.maximum(likeness, cosine)
        centres.append(unit[blocks, likeness.argmin(-1)])
    return torch.stack(centres, dim=1)


def lloyd(unit: Tensor, centres: Tensor, iterations: int) -> Tensor:
    """Alternate assignment and sign-aligned means; blocks that have settled are left as they are, and out.

    Cosines are kept as [B, K, n]: the maximum over K then runs over neighbours in memory, and both steps
    of a round are matrix products.
    """
    settled = centres.clone()
    running = torch.arange(len(unit), device=unit.device)
    assigned = torch.full(unit.shape[:2], -1, device=unit.device)
    for _ in range(iterations):
        nearest, signed = closest(centres, unit)
        moving = (nearest != assigned).any(-1)
        if not moving.all():
            running, unit, centres = running[moving], unit[moving], centres[moving]
            nearest, signed = nearest[moving], signed[moving]
            if not len(running):
                break
        assigned = nearest
        member = unit.new_zeros(*centres.shape[:2], unit.shape[1])
        member.scatter_(1, nearest[:, None], torch.where(signed < 0, -1.0, 1.0)[:, None])
        total = member @ unit
        length = total.norm(dim=-1, keepdim=True)
        centres = torch.where(length > TINY, total / length.clamp(min=TINY), centres)
        settled[running] = centres
    return settled


def closest(centres: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Centre with the largest |inner product|, the first of equals, int64 [B, n]; and that product, signed."""
    inner = centres @ rows.mT
    nearest = inner.abs().max(dim=1).indices
    return nearest, inner.gather(1, nearest[:, None])[:, 0]


def split(coefficients: Tensor, centres: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor, Tensor]:
    """Nearest centre, signed gain along it in the stored precision, and what is left.

    Parameters
    ----------
    coefficients : Tensor
        float32 [B, n, W].
    centres : Tensor
        float32 [B, K, W], as the decoder will read them.
    rounding : Rounding
        To the stored precision.

    Returns
    -------
    segment : Tensor
        int64 [B, n].
    gain : Tensor
        Stored dtype [B, n].
    residual : Tensor
        float32 [B, n, W]: coefficients - gain * centre, with the rounded gain.
    """
    segment, inner = closest(centres, coefficients)
    gain = rounding(inner, "gain")
    return segment, gain, coefficients - predict(centres, segment, gain)


def predict(centres: Tensor, segment: Tensor, gain: Tensor) -> Tensor:
    """gain * centre for each vector, float32 [B, n, W]."""
    blocks, count, width = centres.shape
    index = segment + count * torch.arange(blocks, device=segment.device)[:, None]
    chosen = centres.flatten(0, 1).index_select(0, index.flatten()).view(*segment.shape, width)
    return chosen * gain.float()[..., None]
