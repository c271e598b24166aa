"""Principal components of few and correlated samples, and how large each of them is out of sample."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.shared.moments import Moments
from kvlab.codecs.shared.transform import fixed_sign


def principal(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Variances descending [..., D] and axes as columns [..., D, D] of a covariance [..., D, D]."""
    values, axes = torch.linalg.eigh((covariance + covariance.mT) / 2)
    return values.flip(-1).clamp(min=0), fixed_sign(axes.flip(-1), dim=-2)


def out_of_sample_variance(moments: Moments) -> Tensor:
    """Variance of each principal component on tokens that its axes were not fitted on, descending [heads, D].

    Eigenvalues of a sample are spread more than the true ones: what an axis was chosen for does not
    repeat itself. The i-th axis fitted without a fold is therefore measured on that fold (cross-validated
    eigenvalues: Abadir, Distaso and Zikes 2014; Lam 2016; Bartz 2016), and the result made monotone, as
    Bartz does. Folds are runs of neighbours, so that tokens that follow each other do not vouch for each other.

    The moments of the folds are all that it takes: the squares of a fold's rows along an axis a, about the
    mean m of the others, add up to a^T (S + n (m' - m) (m' - m)^T) a, with S, n and m' of the fold.
    """
    total = torch.zeros_like(moments.mean[0])
    for fold in moments.count.nonzero().flatten().tolist():
        count, mean, scatter = moments.pooled(leave_out=fold)
        _, axes = principal(scatter / max(count - 1, 1))
        apart = ((moments.mean[fold] - mean)[:, None] @ axes)[:, 0]
        spread = torch.einsum("hdi,hde,hei->hi", axes, moments.scatter[fold], axes)
        total += spread + moments.count[fold] * apart.square()
    return descending(total.clamp(min=0) / moments.count.sum())


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
