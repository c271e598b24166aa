"""Principal components of few and correlated samples, and how large each of them is out of sample."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codec.transform import fixed_sign

FOLDS = 16


def principal(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [..., D], variances descending [..., D] and axes as columns [..., D, D] of rows [..., n, D]."""
    mean = rows.mean(-2)
    centred = rows - mean[..., None, :]
    values, axes = torch.linalg.eigh(centred.mT @ centred / max(rows.shape[-2] - 1, 1))
    return mean, values.flip(-1).clamp(min=0), fixed_sign(axes.flip(-1), dim=-2)


def folds(count: int, most: int = FOLDS) -> list[slice]:
    """`count` tokens as at most `most` runs of neighbours, two tokens long at least."""
    number = max(1, min(most, count // 2))
    return [slice(count * i // number, count * (i + 1) // number) for i in range(number)]


def without(rows: Tensor, fold: slice) -> Tensor:
    """Rows [..., n, D] without those of a fold."""
    return torch.cat((rows[..., : fold.start, :], rows[..., fold.stop :, :]), dim=-2)


def out_of_sample_variance(rows: Tensor) -> Tensor:
    """Variance of each principal component on tokens that its axes were not fitted on, descending [..., D].

    Eigenvalues of a sample are spread more than the true ones: what an axis was chosen for does not
    repeat itself. The i-th axis fitted without a fold is therefore measured on that fold (cross-validated
    eigenvalues: Abadir, Distaso and Zikes 2014; Lam 2016; Bartz 2016), and the result made monotone, as
    Bartz does. Folds are runs of neighbours, so that tokens that follow each other do not vouch for each other.

    Parameters
    ----------
    rows : Tensor
        [..., n, D] in the order of time, float64.
    """
    total = torch.zeros_like(rows[..., 0, :])
    for fold in folds(rows.shape[-2]):
        mean, _, axes = principal(without(rows, fold))
        total += ((rows[..., fold, :] - mean[..., None, :]) @ axes).square().sum(-2)
    return descending(total / rows.shape[-2])


def descending(values: Tensor) -> Tensor:
    """The nearest non-increasing sequence in least squares, along the last axis.

    In the min-max form of isotonic regression (Barlow et al. 1972): entry i is the least, over starts up
    to i, of the greatest mean of a run from there to i or beyond.
    """
    size = values.shape[-1]
    running = torch.nn.functional.pad(values.cumsum(-1), (1, 0))
    length = torch.arange(1, size + 1)[None, :] - torch.arange(size)[:, None]
    means = (running[..., None, 1:] - running[..., :-1, None]) / length.clamp(min=1).to(values)
    means = means.masked_fill((length < 1).to(values.device), -torch.inf)
    greatest = means.flip(-1).cummax(-1).values.flip(-1)  # over ends from i on
    return greatest.masked_fill((length < 1).to(values.device), torch.inf).amin(-2)
