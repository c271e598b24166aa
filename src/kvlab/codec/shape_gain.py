"""Shape-gain split: a few directions per block, and each vector's signed length along the nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codec.seeding import generator
from kvlab.codec.stored import Rounding

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
    draw = torch.rand(unit.shape[1], generator=generator("kmeans", seed)).to(unit.device)
    chosen = torch.where(valid, draw, -1.0).argmax(-1)
    blocks = torch.arange(len(unit), device=unit.device)
    likeness = torch.where(valid, -2.0, 2.0)
    centres = [unit[blocks, chosen]]
    for _ in range(n_centres - 1):
        likeness = torch.maximum(likeness, torch.bmm(unit, centres[-1][:, :, None])[..., 0])
        centres.append(unit[blocks, likeness.argmin(-1)])
    return torch.stack(centres, dim=1)


def lloyd(unit: Tensor, centres: Tensor, iterations: int) -> Tensor:
    """Alternate assignment and sign-aligned means; blocks that have settled stay as they are."""
    assigned = torch.full(unit.shape[:2], -1, device=unit.device)
    for _ in range(iterations):
        cosine = unit @ centres.mT
        nearest = cosine.abs().argmax(-1)
        moving = (nearest != assigned).any(-1)
        if not moving.any():
            break
        assigned = nearest
        index = nearest[..., None]
        sign = torch.where(cosine.gather(-1, index) < 0, -1.0, 1.0)
        member = torch.zeros_like(cosine).scatter_(-1, index, sign)
        total = member.mT @ unit
        length = total.norm(dim=-1, keepdim=True)
        renewed = (length > TINY) & moving[:, None, None]
        centres = torch.where(renewed, total / length.clamp(min=TINY), centres)
    return centres


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
    inner = coefficients @ centres.mT
    segment = inner.abs().argmax(-1)
    gain = rounding(inner.gather(-1, segment[..., None])[..., 0], "gain")
    return segment, gain, coefficients - predict(centres, segment, gain)


def predict(centres: Tensor, segment: Tensor, gain: Tensor) -> Tensor:
    """gain * centre for each vector, float32 [B, n, W]."""
    index = segment[..., None].expand(-1, -1, centres.shape[-1])
    return gain.float()[..., None] * centres.gather(1, index)
