"""What scores keep of the attention that was really paid: rank correlation, and mass on what they rank first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

MOST = 0.9  # of the mass, of which `needed` says how many tokens hold it


def budget(share: float, n: int) -> int:
    """How many of n a share is: rounded up, so at least one; a hair above a whole number is rounding, not more."""
    return min(n, max(1, math.ceil(share * n - 1e-9)))


def spearman(scores: Tensor, truth: Tensor) -> Tensor:
    """Rank correlation along the last axis, equal numbers sharing the mean of their ranks.

    Pearson's correlation of the ranks (Spearman 1904), which is right with ties, as the formula with squared
    differences is not.

    Parameters
    ----------
    scores : Tensor
        [..., n].
    truth : Tensor
        Broadcast against it.

    Returns
    -------
    Tensor
        float64 [...]; NaN where one side is constant.
    """
    a, b = (_ranks(x) for x in (scores, truth))
    with np.errstate(invalid="ignore"):
        rho = (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return torch.from_numpy(np.asarray(rho))


def _ranks(x: Tensor) -> np.ndarray:
    ranks = rankdata(x.double().numpy(), method="average", axis=-1)
    return ranks - ranks.mean(-1, keepdims=True)


def gained(scores: Tensor, mass: Tensor) -> Tensor:
    """Mass of the highest ranked one, two, ... of n; of equals the first comes first.

    Parameters
    ----------
    scores : Tensor
        [..., n].
    mass : Tensor
        float64, broadcast against it.

    Returns
    -------
    Tensor
        float64 [..., n]; the last one is all of the mass.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return mass.expand(scores.shape).gather(-1, order).cumsum(-1)


def recalled(scores: Tensor, mass: Tensor, shares: Sequence[float]) -> Tensor:
    """Share of the mass on what is kept at each budget, float64 [..., budgets]."""
    running = gained(scores, mass)
    kept = [budget(share, scores.shape[-1]) - 1 for share in shares]
    return running[..., kept] / running[..., -1:]


def needed(scores: Tensor, mass: Tensor) -> Tensor:
    """The smallest share of n that holds `MOST` of the mass, float64 [...]."""
    running = gained(scores, mass)
    enough = (running < MOST * running[..., -1:]).sum(-1) + 1
    return enough.double() / scores.shape[-1]


def forced(n: int, sinks: int, recent: int) -> Tensor:
    """bool [n]: the first `sinks` and the last `recent` tokens."""
    place = torch.arange(n)
    return (place < sinks) | (place >= n - recent)


def kept_with(must: Tensor, share: float) -> int:
    """Tokens that are kept at a budget: never fewer than are forced."""
    return max(int(must.sum()), budget(share, len(must)))


def kept_by_slip(must: Tensor, share: float) -> int:
    """The same as the published study counted: its slice of the last 0 of an order took all of them."""
    extra = max(0, budget(share, len(must)) - int(must.sum()))
    order = torch.arange(len(must))[~must]
    return int(must.sum()) + len(order[-extra:])


def recalled_with(must: Tensor, scores: Tensor, mass: Tensor, shares: Sequence[float]) -> Tensor:
    """As `recalled`, where forced tokens take their part of the budget first, and more than all of it if need be.

    Where they leave nothing, they alone are kept.
    """
    running = gained(scores.masked_fill(must, math.inf), mass)
    kept = [kept_with(must, share) - 1 for share in shares]
    return running[..., kept] / running[..., -1:]


def by_chunk(x: Tensor, size: int, reduce: str, empty: float) -> Tensor:
    """Numbers of tokens [..., n] as numbers of chunks [..., ceil(n / size)]: their "sum" or their "amax"."""
    short = -x.shape[-1] % size
    chunks = torch.nn.functional.pad(x, (0, short), value=empty).unflatten(-1, (-1, size))
    return chunks.sum(-1) if reduce == "sum" else chunks.amax(-1)
