"""What a cache's sources are on scored text: variances in nats of what prediction leaves.

Layer by layer, in the order in which `archive` decodes: the least squares prediction of K from the layer below, and of
V from that and its own layer's K, with the moments of the scored text itself. What is left is counted in the metric of
the calibration, whose unit is the nat. Given the noise that decoding leaves in the predictors, the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codecs.archive.model import STREAMS, ArchiveModel, sources_of
from kvlab.codecs.archive.moments import Across
from kvlab.codecs.shared.grouping import diagonal_blocks

FLOOR = 1e-30  # nats
RIDGE = 1e-5  # of each predictor's own variance; heads may be wider together than what they are projected from


@dataclass(frozen=True)
class ComponentVariances:
    """Variances of the components of every layer's K and V, float64 [width], by layer and stream."""

    variances: dict[tuple[int, str], Tensor]


def without_prediction(model: ArchiveModel, moments: Sequence[Across]) -> ComponentVariances:
    """Those of K and V themselves."""
    found = {}
    for layer, stream in model.streams:
        own, _ = _parts(moments[layer], stream, [])
        found[layer, stream] = _eigen(model, layer, stream, own)[0]
    return ComponentVariances(found)


def predicted(
    model: ArchiveModel, moments: Sequence[Across], noise: Callable[[int, Tensor], Tensor] | None = None
) -> ComponentVariances:
    """Those of what prediction leaves.

    Parameters
    ----------
    model : ArchiveModel
        Says the metric, and whether the first layer is known by the token ids.
    moments : sequence of Across
        Of the scored text, by layer.
    noise : callable, optional
        Of a layer and its components' variances the mean squared error of each component, in nats, after decoding
        [width]; without it the predictors are the originals.
    """
    found, errors = {}, {}
    for layer in range(model.layers):
        for stream in STREAMS:
            if layer == 0 and bool(model.by_tokens):
                found[layer, stream] = torch.full((moments[0].width,), FLOOR, dtype=torch.float64)
                errors[layer, stream] = torch.zeros(moments[0].width, moments[0].width, dtype=torch.float64)
                continue
            left = _left(moments[layer], layer, stream, errors)
            values, axes = _eigen(model, layer, stream, left)
            found[layer, stream] = values
            errors[layer, stream] = torch.zeros_like(left)
            if noise:
                own = noise(layer, values).unflatten(0, (len(axes), -1))
                errors[layer, stream] = torch.block_diag(*(axes.mT @ (own[..., None] * axes)))
    return ComponentVariances(found)


def _left(moments: Across, layer: int, stream: str, errors: dict) -> Tensor:
    """Covariance of what prediction leaves [width, width], as large as on text that the prediction has not seen."""
    sources = sources_of(layer, stream)
    own, (clean, cross) = _parts(moments, stream, sources)
    if not sources:
        return own
    system = clean + torch.block_diag(*(errors[source] for source in sources))
    system = system + RIDGE * torch.diag(clean.diagonal())
    weights = torch.cholesky_solve(cross, torch.linalg.cholesky(system))
    return (own - cross.mT @ weights) / (1 - min(len(system) / moments.count, 0.5))


def _parts(moments: Across, stream: str, sources: list) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Covariance of a stream, of its predictors, and of both."""
    width, place = moments.width, STREAMS.index(stream)
    covariance, start = moments.scatter / max(moments.count - 1, 1), len(moments.mean) - (2 - place) * moments.width
    own, given = slice(start, start + width), slice(0, len(sources) * width)
    return covariance[own, own], (covariance[given, given], covariance[given, own])


def _eigen(model: ArchiveModel, layer: int, stream: str, left: Tensor) -> tuple[Tensor, Tensor]:
    """Variances of the components in nats [width], and what takes components to values [groups, width, width]."""
    forward = model.streams[layer, stream].forward.double()  # of values to roots of nats, in other axes
    values, axes = torch.linalg.eigh(forward.mT @ diagonal_blocks(left[None], len(forward)) @ forward)
    q, r = torch.linalg.qr(forward @ axes)  # its inverse is R^-1 Q^T
    to_values = torch.linalg.solve_triangular(r, q.mT.contiguous(), upper=True)
    return values.clamp(min=FLOOR).flatten(), to_values
