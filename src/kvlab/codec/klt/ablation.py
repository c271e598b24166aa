"""`klt` with a part taken out: the components that its recipe asks for, made of those that were calibrated.

A part that is taken out is replaced by what a codec without it would do, and the rest stays: so each part's worth can
be measured. `transform`: the KLT of the plain covariance (``unweighted``), or the channels as they are under the
metric's diagonal (``none``). `tables`: those of a Gaussian, which other axes need, as sketches are of the calibrated
components. `allocation`: the same bits for every component, but for what does not go round (`allocation.in_turn`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvlab.base.errors import ParamsError
from kvlab.base.recipe import KltStream
from kvlab.codec.klt import covariance
from kvlab.codec.klt.components import FLOOR, TINY, Components
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
    made = {"klt": _same, "unweighted": unweighted, "none": untransformed}[recipe.transform](components)
    if recipe.tables == "fitted":
        return made
    heads, dim, _ = made.sketch.shape
    return replace(made, sketch=gaussian_sketch(heads * dim).unflatten(0, (heads, dim)).to(made.sketch))


def _same(components: Components) -> Components:
    return components


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
