"""`klt` with a part taken out: the components that its recipe asks for, made of those that were calibrated.

A part that is taken out is replaced by what a codec without it would do, and the rest stays: so each part's worth can
be measured. `transform`: the KLT of each head alone (``per_head``), that of the plain covariance (``unweighted``), or
the channels as they are under the metric's diagonal (``none``). `tables`: those of a Gaussian, which other axes need,
as sketches are of the calibrated components. `allocation`: the same bits for every component, but for what does not go
round (`allocation.in_turn`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvlab.base.errors import ParamsError
from kvlab.base.recipe import KltStream
from kvlab.codec.klt import covariance
from kvlab.codec.klt.components import FLOOR, TINY, Components
from kvlab.codec.klt.grouping import block_diagonal
from kvlab.codec.klt.marginal import gaussian_sketch


def asked(components: Components, recipe: KltStream) -> Components:
    """The components that a recipe codes by; the calibrated ones themselves where it takes nothing out of them.

    Raises
    ------
    ParamsError
        It asks for other axes and for tables fitted to them, which no calibration holds.
    """
    if recipe.transform != "klt" and recipe.tables != "gaussian":
        raise ParamsError(f"klt with transform {recipe.transform!r} has no fitted tables; set tables to 'gaussian'")
    made = WAYS[recipe.transform](components)
    if recipe.tables == "fitted":
        return made
    groups, width, _ = made.sketch.shape
    return replace(made, sketch=gaussian_sketch(groups * width).unflatten(0, (groups, width)).to(made.sketch))


def _same(components: Components) -> Components:
    return components


def per_head(components: Components) -> Components:
    """The KLT of each head without the others, in the same metric."""
    metric = components.head_metric
    chol = torch.linalg.cholesky(metric)
    variance, axes = covariance.principal(chol.mT @ components.head_covariance.double() @ chol)
    identity = torch.eye(metric.shape[-1], dtype=metric.dtype).expand_as(metric)
    back = axes.mT @ torch.linalg.solve_triangular(chol, identity, upper=False)
    groups = len(components.variance)
    return _with(
        components,
        block_diagonal(chol @ axes, groups),
        block_diagonal(back, groups),
        variance.reshape(groups, -1),
    )


def unweighted(components: Components) -> Components:
    """The KLT without the metric: principal components of the plain covariance, all errors weighed alike."""
    variance, axes = covariance.principal(components.covariance.double())
    return _with(components, axes, axes.mT, variance)


def untransformed(components: Components) -> Components:
    """The channels as they are, each weighed by the metric's diagonal.

    The metric is F F^T with F the way to the calibrated components, whose axes are orthonormal in its frame.
    """
    forward = components.forward.double()
    root = forward.square().sum(-1).clamp(min=TINY).sqrt()
    variance = components.covariance.double().diagonal(dim1=-2, dim2=-1) * root.square()
    return _with(components, torch.diag_embed(root), torch.diag_embed(1 / root), variance)


def _with(components: Components, forward, inverse, variance) -> Components:
    """Other axes, no component smaller than a calibrated one may be."""
    floor = FLOOR * variance.mean(-1, keepdim=True) + TINY
    found = {"forward": forward, "inverse": inverse, "variance": torch.maximum(variance, floor)}
    return replace(components, **{name: value.float().contiguous() for name, value in found.items()})


WAYS = {"klt": _same, "per_head": per_head, "unweighted": unweighted, "none": untransformed}
