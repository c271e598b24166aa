"""The calibrated components of a stream: its KLT in the metric that the errors are weighed by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codecs.shared import covariance
from kvlab.codecs.shared.grouping import diagonal_blocks, factor, heads_together, joined
from kvlab.codecs.shared.moments import Moments
from kvlab.codecs.shared.sketch import gaussian_sketch, sketch
from kvlab.core.errors import CalibrationMismatch, NonFinite

FLOOR = 1e-10  # of the mean square: what float32 rounding of the rows themselves comes to, and a margin
TINY = 1e-30


@dataclass(frozen=True)
class Components:
    """Mean, covariance and KLT of one layer's K or V, joint over the heads of a group (`grouping`), float32.

    With y = (joined(x) - joined(mean)) @ forward the weighted squared error of x is the plain squared error of y, and
    the components of y are uncorrelated on the calibration split, largest variance first.

    Parameters
    ----------
    mean : Tensor
        [heads, head_dim].
    sink : Tensor
        A second mean [heads, head_dim]: of the first token of a text, on which attention rests when it has nothing to
        look for (Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks). It is nearly the same
        in every text, and lies far from `mean`.
    covariance : Tensor
        Of joined x, plain, not shrunk and not weighted [groups, width, width].
    forward, inverse : Tensor
        [groups, width, width]; ``forward @ inverse`` is the identity.
    variance : Tensor
        Variance of each component as expected out of sample, descending [groups, width].
    sketch : Tensor
        Quantiles of each component over its standard deviation, at (i + 1/2) / S, ascending
        [groups, width, S]; what Lloyd-Max tables of any rate are fitted on.
    """

    mean: Tensor
    sink: Tensor
    covariance: Tensor
    forward: Tensor
    inverse: Tensor
    variance: Tensor
    sketch: Tensor

    @property
    def head_covariance(self) -> Tensor:
        """Covariance of each head alone, float32 [heads, head_dim, head_dim]."""
        return diagonal_blocks(self.covariance, len(self.mean))

    @property
    def head_metric(self) -> Tensor:
        """What the squared error of each head is weighed by, float64 [heads, head_dim, head_dim]."""
        forward = self.forward.double()
        return diagonal_blocks(forward @ forward.mT, len(self.mean))


def fit(rows: Tensor, metric: Tensor | None) -> Components:
    """The components of a stream, computed in float64 on the rows' device.

    Parameters
    ----------
    rows : Tensor
        [heads, segments, tokens, head_dim], any float dtype; the tokens of a segment follow each other.
    metric : Tensor or None
        What squared errors are weighed by [heads, head_dim, head_dim], positive definite.
        `codecs.shared.metric` makes those of the pipeline: Sigma_q averaged over lags for K, W_o^T W_o for V, both
        ridged. None weighs all alike.

    Raises
    ------
    NonFinite
        When a row holds NaN or infinity.
    CalibrationMismatch
        When there are fewer than 4 tokens, or the metric is of another shape.
    """
    flat = rows.flatten(1, 2)
    groups = len(flat) // heads_together(len(flat), flat.shape[2])
    return fit_moments(Moments.of(joined(flat, groups)), rows, metric)


def fit_moments(moments: Moments, sample: Tensor, metric: Tensor | None, sink: Tensor | None = None) -> Components:
    """The components of a stream whose tokens are gone but for a sample.

    Mean, covariance, axes and variances come from the moments, the components' shapes (the quantiles of each over its
    own standard deviation) from the sample. Where the sample is all that there was, `fit` gives the same.

    Parameters
    ----------
    moments : Moments
        Of all tokens, their heads joined.
    sample : Tensor
        Some of them, as the rows of `fit`.
    metric : Tensor or None
        As for `fit`, which also says what is raised.
    sink : Tensor or None
        The second mean [heads, head_dim]; None for no other than the first.
    """
    refuse_broken(moments, sample)
    heads, head_dim = sample.shape[0], sample.shape[-1]
    chol, inverse = factor(metric, moments.mean[0], heads, head_dim)
    count, mean, scatter = moments.pooled()
    weighed = moments.turned(chol)
    _, weighed_mean, weighed_scatter = weighed.pooled()
    raw, axes = covariance.principal(weighed_scatter / (count - 1))
    power = weighed_scatter.diagonal(dim1=-2, dim2=-1) / count + weighed_mean.square()
    floor = FLOOR * power.mean(-1, keepdim=True) + TINY
    y = joined(sample.flatten(1, 2), len(mean)).to(chol) @ (chol @ axes)
    mean = mean.reshape(heads, head_dim)
    fitted = Components(
        mean=mean,
        sink=mean if sink is None else sink,
        covariance=scatter / (count - 1),
        forward=chol @ axes,
        inverse=axes.mT @ inverse,
        variance=torch.maximum(covariance.out_of_sample_variance(weighed), floor),
        sketch=torch.stack([_sketch(y[g], raw[g], floor[g]) for g in range(len(y))]),
    )
    return Components(**{name: value.float().contiguous() for name, value in vars(fitted).items()})


def refuse_broken(moments: Moments, sample: Tensor) -> None:
    """`NonFinite`, or `CalibrationMismatch` for too few tokens; see `fit`."""
    head_dim = moments.mean.shape[-1]
    if moments.count.sum() < 4 or sample.shape[1] * sample.shape[2] < 4:
        tokens = int(min(moments.count.sum(), sample.shape[1] * sample.shape[2]))
        raise CalibrationMismatch(
            f"{tokens} tokens are too few to fit components on, 4 are the least and a multiple of the"
            f" {head_dim} dimensions is sensible; use more calibration windows",
            code="calibration.too-few-tokens",
        )
    if not (torch.isfinite(moments.scatter).all() and torch.isfinite(sample).all()):
        raise NonFinite("the rows to fit components on hold NaN or infinity")


def _sketch(y: Tensor, variance: Tensor, floor: Tensor) -> Tensor:
    """Sketches of y [n, D], each about its own mean and of its own variance; Gaussian where `variance` is nothing."""
    centred = y - y.mean(0)
    own = centred.square().sum(0) / (len(y) - 1)
    shape = sketch((centred / own.clamp(min=floor.item()).sqrt()).mT.contiguous())
    return torch.where((variance > floor)[:, None], shape, gaussian_sketch(len(shape)).to(shape))
