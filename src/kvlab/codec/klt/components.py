"""The calibrated components of a stream: its KLT in the metric that the errors are weighed by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.base.errors import CalibrationMismatch, NonFinite
from kvlab.codec import whitening
from kvlab.codec.klt import covariance
from kvlab.codec.klt.allocation import reverse_water_filling
from kvlab.codec.klt.marginal import Marginals, decibels, gaussian_sketch, sketch
from kvlab.codec.klt.moments import Moments, folds

FLOOR = 1e-10  # of the mean square: what float32 rounding of the rows themselves comes to, and a margin
TINY = 1e-30
MISMATCH_FOLDS, MISMATCH_BITS = 4, 3


@dataclass(frozen=True)
class Components:
    """Mean, covariance and KLT of one layer's K or V, per KV head, float32.

    With y = (x - mean) @ forward the weighted squared error of x is the plain squared error of y, and
    the components of y are uncorrelated on the calibration split, largest variance first.

    Parameters
    ----------
    mean : Tensor
        [heads, head_dim].
    covariance : Tensor
        Of x, plain, not shrunk and not weighted [heads, head_dim, head_dim].
    forward, inverse : Tensor
        [heads, head_dim, head_dim]; ``forward @ inverse`` is the identity.
    variance : Tensor
        Variance of each component as expected out of sample, descending [heads, head_dim].
    sketch : Tensor
        Quantiles of each component over its standard deviation, at (i + 1/2) / S, ascending
        [heads, head_dim, S]; what Lloyd-Max tables of any rate are fitted on.
    """

    mean: Tensor
    covariance: Tensor
    forward: Tensor
    inverse: Tensor
    variance: Tensor
    sketch: Tensor


def fit(rows: Tensor, metric: Tensor | None) -> Components:
    """The components of a stream, computed in float64 on the rows' device.

    Parameters
    ----------
    rows : Tensor
        [heads, segments, tokens, head_dim], any float dtype; the tokens of a segment follow each other.
    metric : Tensor or None
        What squared errors are weighed by [heads, head_dim, head_dim], positive definite.
        `codec.metric` makes those of the pipeline: Sigma_q averaged over lags for K, W_o^T W_o for V, both
        ridged. None weighs all alike.

    Raises
    ------
    NonFinite
        When a row holds NaN or infinity.
    CalibrationMismatch
        When there are fewer than 4 tokens, or the metric is of another shape.
    """
    return fit_moments(Moments.of(rows.flatten(1, 2)), rows, metric)


def fit_moments(moments: Moments, sample: Tensor, metric: Tensor | None) -> Components:
    """The components of a stream whose tokens are gone but for a sample.

    Mean, covariance, axes and variances come from the moments, the components' shapes (the quantiles of each over its
    own standard deviation) from the sample. Where the sample is all that there was, `fit` gives the same.

    Parameters
    ----------
    moments : Moments
        Of all tokens.
    sample : Tensor
        Some of them, as the rows of `fit`.
    metric : Tensor or None
        As for `fit`, which also says what is raised.
    """
    refuse_broken(moments, sample)
    chol, inverse = _factor(metric, moments.mean[0], moments.mean.shape[-1])
    count, mean, scatter = moments.pooled()
    weighed = moments.turned(chol)
    _, weighed_mean, weighed_scatter = weighed.pooled()
    raw, axes = covariance.principal(weighed_scatter / (count - 1))
    power = weighed_scatter.diagonal(dim1=-2, dim2=-1) / count + weighed_mean.square()
    floor = FLOOR * power.mean(-1, keepdim=True) + TINY
    y = sample.flatten(1, 2).to(chol) @ (chol @ axes)
    fitted = Components(
        mean=mean,
        covariance=scatter / (count - 1),
        forward=chol @ axes,
        inverse=axes.mT @ inverse,
        variance=torch.maximum(covariance.out_of_sample_variance(weighed), floor),
        sketch=torch.stack([_sketch(y[h], raw[h], floor[h]) for h in range(len(y))]),
    )
    return Components(**{name: value.float().contiguous() for name, value in vars(fitted).items()})


def refuse_broken(moments: Moments, sample: Tensor) -> None:
    """`NonFinite`, or `CalibrationMismatch` for too few tokens; see `fit`."""
    head_dim = moments.mean.shape[-1]
    if moments.count.sum() < 4 or sample.shape[1] * sample.shape[2] < 4:
        tokens = int(min(moments.count.sum(), sample.shape[1] * sample.shape[2]))
        raise CalibrationMismatch(
            f"{tokens} tokens are too few to fit components on, 4 are the least and a multiple of the"
            f" {head_dim} dimensions is sensible; use more calibration windows"
        )
    if not (torch.isfinite(moments.scatter).all() and torch.isfinite(sample).all()):
        raise NonFinite("the rows to fit components on hold NaN or infinity")


def _factor(metric: Tensor | None, like: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of the metric and its inverse, as `like` [heads, head_dim] is kept."""
    heads = like.shape[0]
    identity = torch.eye(head_dim, dtype=like.dtype, device=like.device).expand(heads, -1, -1)
    if metric is None:
        return identity, identity
    if metric.shape != identity.shape:
        raise CalibrationMismatch(
            f"the metric has shape {list(metric.shape)}, rows of {heads} heads of {head_dim} dimensions need"
            f" {list(identity.shape)}; fit metric and components on the same model"
        )
    metric = metric.to(like)
    chol, failed = torch.linalg.cholesky_ex((metric + metric.mT) / 2)
    if failed.any() or not torch.isfinite(chol).all():
        raise whitening.NotPositiveDefinite("the metric is not positive definite; use a larger calibration.ridge")
    return chol, torch.linalg.solve_triangular(chol, identity, upper=False)


def _sketch(y: Tensor, variance: Tensor, floor: Tensor) -> Tensor:
    """Sketches of y [n, D], each about its own mean and of its own variance; Gaussian where `variance` is nothing."""
    centred = y - y.mean(0)
    own = centred.square().sum(0) / (len(y) - 1)
    shape = sketch((centred / own.clamp(min=floor.item()).sqrt()).mT.contiguous())
    return torch.where((variance > floor)[:, None], shape, gaussian_sketch(len(shape)).to(shape))


def mismatch(rows: Tensor, metric: Tensor | None) -> Tensor:
    """What coding tokens that the fit has not seen costs over coding those that it has, in dB [heads].

    Each of four runs of tokens is coded, at 3 bits per value, with what the other three were fitted to.
    6.02 dB are one bit. Parameters as for `fit`; the result is on the CPU, where all of it is computed.
    """
    rows, metric = rows.cpu(), None if metric is None else metric.cpu()  # tables are made there
    flat = rows.double().flatten(1, 2)
    seen, unseen = torch.zeros(len(flat)).double(), torch.zeros(len(flat)).double()
    for fold in folds(flat.shape[1], MISMATCH_FOLDS):
        rest = covariance.without(flat, fold)
        fitted = fit(rest[:, None], metric)
        for head in range(len(flat)):
            marginals = Marginals(fitted.sketch[head])
            seen[head] += _error(rest[head], fitted, head, marginals) * (fold.stop - fold.start)
            unseen[head] += _error(flat[head, fold], fitted, head, marginals) * (fold.stop - fold.start)
    return decibels(unseen / seen.clamp(min=TINY))


def _error(x: Tensor, fitted: Components, head: int, marginals: Marginals) -> float:
    """Mean weighted squared error of x [n, D] coded with the components of one head and their tables."""
    deviation = fitted.variance[head].double().sqrt()
    z = ((x - fitted.mean[head].double()) @ fitted.forward[head].double() / deviation).mT
    bits = reverse_water_filling(
        fitted.variance[head].double()[:, None] * marginals.distortion(), MISMATCH_BITS * len(z)
    )
    total = 0.0
    for width in bits.unique().tolist():
        of_width = bits == width
        values = marginals.tables[width].values[of_width]
        index = torch.searchsorted(((values[:, 1:] + values[:, :-1]) / 2).contiguous(), z[of_width].contiguous())
        error = (z[of_width] - values.gather(1, index)) * deviation[of_width, None]
        total += error.square().sum().item()
    return total / x.shape[0]
