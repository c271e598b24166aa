"""What an archive's calibration is fitted on, and how: moments across two layers, a metric in nats, and a sample.

The prediction is the least squares one from values with the noise that decoding leaves in them (`REFERENCE`), the
components are those of what it leaves. Everything is stored as whole numbers where a decoder computes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlab.codecs.archive.counting import Counting, LayerSample
from kvlab.codecs.archive.exact import ExactMap, on_grid, power_of_two, unit_of
from kvlab.codecs.archive.layer import StreamModel
from kvlab.codecs.archive.model import SPECTRA, STREAMS, ArchiveModel, sources_of
from kvlab.codecs.archive.moments import Across
from kvlab.codecs.archive.steps import OCTAVE, exponents
from kvlab.codecs.shared.covariance import principal
from kvlab.codecs.shared.grouping import diagonal_blocks, factor, heads_together

REFERENCE = 12 * OCTAVE  # the quality that prediction and components are fitted at
RIDGE = 1e-4  # of each predictor's own variance
TINY = 1e-30


def fit(
    across: Sequence[Across],
    metric: Callable[[int, str], Tensor],
    first: Callable[[int, str], Tensor],
    sample: Callable[[int], LayerSample],
    known: Sequence[tuple[Tensor, Tensor]] | None,
) -> ArchiveModel:
    """The archive codec of a model.

    Parameters
    ----------
    across : sequence of Across
        Of each layer.
    metric : callable
        What squared errors of a layer's K or V are weighed by, in nats, float64 [kv_heads, head_dim, head_dim].
    first : callable
        Mean of a layer's K or V at the first token of a text, float64 [kv_heads, head_dim].
    sample : callable
        A few windows of a layer.
    known : sequence of tuple of Tensor or None
        K and V of the first layer by the token ids (`tokens.FirstLayer.rows`), of each window of the sample; None
        where they are not known.
    """
    fitter = _Fitter(across, metric, first, sample, known)
    streams = {(layer, s): fitter.stream(layer, s) for layer in range(len(across)) for s in STREAMS}
    found = Counting(streams, len(across)).run(sample, known)
    return ArchiveModel(streams, *found, by_tokens=torch.tensor([known is not None]))


class _Fitter:
    """Fits the streams one after the other; each needs the noise that decoding leaves in those before it."""

    def __init__(self, across, metric, first, sample, known):
        self.across, self.metric, self.first, self.sample, self.known = across, metric, first, sample, known
        self._noise: dict[tuple[int, str], list[Tensor]] = {}  # of each decoded stream, at every quality [width, width]
        self._units: dict[tuple[int, str], int] = {}

    def stream(self, layer: int, stream: str) -> StreamModel:
        """One layer's K or V."""
        moments, place = self.across[layer], STREAMS.index(stream)
        unit = self._units[layer, stream] = unit_of(float(moments.largest[place]))
        sources = [] if self._given(layer) else sources_of(layer, stream)
        weights, offset, left = self._prediction(moments, place, sources)
        if self._given(layer):
            left = [self._unknown(place)] * len(SPECTRA)
        forward, inverse = self._components(layer, stream, left[SPECTRA.index(REFERENCE)])
        variances = torch.stack([_variances(forward, one) for one in left])
        self._noise[layer, stream] = self._noises(layer, variances, inverse)
        units = torch.tensor([self._units[source] for source in sources for _ in range(moments.width)])
        prediction = ExactMap.of(weights * power_of_two(units - unit)[:, None])
        back = ExactMap.of(inverse * 2.0**-unit)
        grid = (offset, self.first(layer, stream))
        offset, first = (on_grid(values, unit).to(torch.int32) for values in grid)
        return StreamModel(
            unit=torch.tensor([unit], dtype=torch.int16),
            first=first,
            offset=offset,
            coefficients=prediction.coefficients,
            places=prediction.places,
            forward=forward.float(),
            inverse=back.coefficients,
            inverse_places=back.places,
            spectrum=(torch.log2(variances) / 2 * OCTAVE).round().to(torch.int16),
        )

    def _given(self, layer: int) -> bool:
        """Whether the token ids say what a layer holds."""
        return layer == 0 and self.known is not None

    def _prediction(self, moments: Across, place: int, sources: list) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Weights [n, width] and offset [width], and the covariance of what is left at every quality."""
        width, own = moments.width, len(moments.mean) - (2 - place) * moments.width
        target, given = slice(own, own + width), slice(0, len(sources) * width)
        covariance = moments.scatter / max(moments.count - 1, 1)
        mean, plain = moments.mean[target], covariance[target, target]
        if not sources:
            return torch.empty(0, width, dtype=torch.float64), mean, [plain] * len(SPECTRA)
        clean, cross = covariance[given, given], covariance[given, target]
        noisy = [clean + torch.block_diag(*(self._noise[s][q] for s in sources)) for q in range(len(SPECTRA))]
        system = noisy[SPECTRA.index(REFERENCE)] + RIDGE * torch.diag(clean.diagonal())
        weights = torch.cholesky_solve(cross, torch.linalg.cholesky(system))
        both = weights.mT @ cross
        share = min(len(weights) / moments.count, 0.5)  # what was fitted is larger on text that was not
        larger = (1 + share) / (1 - share)
        left = [(plain - both - both.mT + weights.mT @ one @ weights) * larger for one in noisy]
        return weights, mean - moments.mean[given] @ weights, left

    def _unknown(self, place: int) -> Tensor:
        """Second moment of what token ids do not say of the first layer [width, width]."""
        rows = self.sample(0).rows[place].double()
        left = torch.cat([own - given[place] for own, given in zip(rows, self.known, strict=True)])
        return left.mT @ left / len(left)

    def _components(self, layer: int, stream: str, left: Tensor) -> tuple[Tensor, Tensor]:
        """The KLT of what is left, in the metric, and its inverse, float64 [groups, group width, group width]."""
        metric, width = self.metric(layer, stream), len(left)
        heads, head_dim = metric.shape[:2]
        groups = heads // heads_together(heads, head_dim)
        chol, inverse = factor(metric, left.new_empty(groups, width // groups), heads, head_dim)
        _, axes = principal(chol.mT @ diagonal_blocks(left[None], groups) @ chol)
        return chol @ axes, axes.mT @ inverse

    def _noises(self, layer: int, variances: Tensor, inverse: Tensor) -> list[Tensor]:
        """Covariance of the error of a decoded stream at every quality: that of a step, or of what it spares."""
        fine = torch.exp2(-exponents(self.sample(layer).expected).double()).mean()
        found = []
        for quality, variance in zip(SPECTRA, variances, strict=True):
            error = variance.clamp(max=float(fine * 4.0 ** (-quality / OCTAVE) / 12)).unflatten(0, (len(inverse), -1))
            found.append(torch.block_diag(*(inverse.mT @ (error[..., None] * inverse))))
        return found


def _variances(forward: Tensor, left: Tensor) -> Tensor:
    """Of the components of what is left [width]."""
    own = forward.mT @ diagonal_blocks(left[None], len(forward)) @ forward
    return own.diagonal(dim1=-2, dim2=-1).flatten().clamp(min=TINY)
