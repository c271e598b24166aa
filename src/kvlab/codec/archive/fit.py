"""What an archive's calibration is fitted on, and how: moments across two layers, a metric in nats, and a sample.

The prediction is the least squares one from values with the noise that decoding leaves in them (`REFERENCE`), the
components are those of what it leaves. Everything is stored as whole numbers where a decoder computes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from kvlab.codec.archive.exact import ExactMap, on_grid, power_of_two, unit_of
from kvlab.codec.archive.layer import POINTS, StreamCoder, StreamModel
from kvlab.codec.archive.steps import EMERGENCY, OCTAVE, POINT, exponents, log_steps
from kvlab.codec.archive.symbols import CLASSES, EXPONENTS, LARGEST, LOW_BITS, TABLES
from kvlab.codec.klt.grouping import block_diagonal, heads_together

REFERENCE = 12 * OCTAVE  # the quality that prediction and components are fitted at
SPECTRA = range(6 * OCTAVE, 21 * OCTAVE, OCTAVE)  # those whose spectra are stored
SEEN = range(9 * OCTAVE, 16 * OCTAVE, 2 * OCTAVE)  # those that indices are counted at
COUNTED = 4  # windows of the sample that are coded for it
ENOUGH = 50  # indices that a reconstruction point is fitted on
TOTAL = 20  # bits of a table's counts
STREAMS = ("k", "v")
RIDGE = 1e-4  # of each predictor's own variance
TINY = 1e-30


class Across:
    """Moments of K and V of one layer together with those of the layer below: what prediction is fitted on.

    Parameters
    ----------
    width : int
        kv_heads * head_dim.
    below : bool
        Whether there is a layer below.

    Attributes
    ----------
    count : float
    mean : Tensor
        float64 [parts * width]: K and V below where there are any, then K and V.
    scatter : Tensor
        Sum of the outer products about the mean, float64 [parts * width, parts * width].
    largest : Tensor
        Largest magnitude of the layer's own K and V, float64 [2].
    """

    def __init__(self, width: int, below: bool):
        size = (4 if below else 2) * width
        self.width, self.count = width, 0.0
        self.mean = torch.zeros(size, dtype=torch.float64)
        self.scatter = torch.zeros(size, size, dtype=torch.float64)
        self.largest = torch.zeros(2, dtype=torch.float64)

    def update(self, rows: Sequence[Tensor]) -> None:
        """Fold in rows of each part, float [tokens, width]; products in float32, sums in float64.

        Folded as Chan, Golub and LeVeque (1979) do.
        """
        joined = torch.cat([part.float().cpu() for part in rows], dim=1)
        mean = joined.double().mean(0)
        centred = joined - mean.float()
        count, apart = float(len(joined)), mean - self.mean
        total = self.count + count
        self.scatter += (centred.mT @ centred).double() + self.count * count / total * torch.outer(apart, apart)
        self.mean += apart * (count / total)
        self.count = total
        own = joined[:, -2 * self.width :].abs().double().unflatten(1, (2, -1)).amax((0, 2))
        self.largest = torch.maximum(self.largest, own)


@dataclass(frozen=True)
class LayerSample:
    """What was seen of one layer on a few windows.

    Parameters
    ----------
    rows : tuple of Tensor
        K and V, heads joined, float32 [windows, tokens, width] each; tokens follow each other from a text's first.
    received : Tensor
        Squared attention of each token, see `steps.exponents` [windows, tokens].
    """

    rows: tuple[Tensor, Tensor]
    received: Tensor


@dataclass(frozen=True)
class ArchiveModel:
    """A fitted archive codec.

    Parameters
    ----------
    streams : dict of (int, str) to StreamModel
        By layer and stream.
    exponents : Tensor
        How often each exponent was seen, int32 [layers, EXPONENTS].
    counts : Tensor
        How often each magnitude was seen, by stream and class, int32 [2, CLASSES, LARGEST + 1].
    points : Tensor
        Reconstruction points, int16 [2, CLASSES, POINTS]; see `layer.StreamCoder`.
    rates : Tensor
        Bits of a value of the sample at every quality of `SEEN`, float32.
    by_tokens : Tensor
        Whether the first layer is taken from the token ids, bool [1].
    """

    streams: dict[tuple[int, str], StreamModel]
    exponents: Tensor
    counts: Tensor
    points: Tensor
    rates: Tensor
    by_tokens: Tensor

    def quality_for(self, bits: float) -> int:
        """About the quality at which a value takes so many bits."""
        return round(float(np.interp(bits, self.rates.tolist(), list(SEEN))))

    @property
    def layers(self) -> int:
        """Of the model."""
        return len(self.exponents)


def spectrum_at(fitted: StreamModel, quality: int) -> Tensor:
    """log2 of the deviations in 64ths at a quality between those that were stored, int32 [width]."""
    place, part = divmod(min(max(quality, SPECTRA.start), SPECTRA[-1]) - SPECTRA.start, OCTAVE)
    low, high = (fitted.spectrum[min(p, len(SPECTRA) - 1)].int() for p in (place, place + 1))
    return low + ((high - low) * part).div(OCTAVE, rounding_mode="floor")


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
    found = _Counting(streams, len(across)).run(sample, known)
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
        metric = self.metric(layer, stream).double()
        groups = len(metric) // heads_together(len(metric), metric.shape[1])
        chol = torch.linalg.cholesky(block_diagonal(metric, groups))
        own = chol.mT @ _blocks(left, groups) @ chol
        axes = torch.linalg.eigh((own + own.mT) / 2).eigenvectors.flip(-1)
        eye = torch.eye(chol.shape[-1], dtype=torch.float64).expand_as(chol)
        return chol @ axes, axes.mT @ torch.linalg.solve_triangular(chol, eye, upper=False)

    def _noises(self, layer: int, variances: Tensor, inverse: Tensor) -> list[Tensor]:
        """Covariance of the error of a decoded stream at every quality: that of a step, or of what it spares."""
        fine = torch.exp2(-exponents(self.sample(layer).received).double()).mean()
        found = []
        for quality, variance in zip(SPECTRA, variances, strict=True):
            error = variance.clamp(max=float(fine * 4.0 ** (-quality / OCTAVE) / 12)).unflatten(0, (len(inverse), -1))
            found.append(torch.block_diag(*(inverse.mT @ (error[..., None] * inverse))))
        return found


def _blocks(matrix: Tensor, groups: int) -> Tensor:
    """The blocks on the diagonal of [width, width], [groups, width / groups, width / groups]."""
    size = len(matrix) // groups
    return torch.stack([matrix[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(groups)])


def _variances(forward: Tensor, left: Tensor) -> Tensor:
    """Of the components of what is left [width]."""
    own = forward.mT @ _blocks(left, len(forward)) @ forward
    return own.diagonal(dim1=-2, dim2=-1).flatten().clamp(min=TINY)


def sources_of(layer: int, stream: str) -> list[tuple[int, str]]:
    """What a layer's K or V is predicted from: K and V of the layer below, and V from K of its own layer too."""
    below = [(layer - 1, "k"), (layer - 1, "v")] if layer else []
    return below + ([(layer, "k")] if stream == "v" else [])


class _Counting:
    """Codes a sample at several qualities, and counts."""

    def __init__(self, streams: dict[tuple[int, str], StreamModel], layers: int):
        self.streams, self.layers = streams, layers
        self.seen = torch.ones(layers, EXPONENTS, dtype=torch.int32)
        self.by_quality = torch.zeros(len(SEEN), 2, CLASSES, LARGEST + 1, dtype=torch.float64)
        self.low = torch.zeros(len(SEEN), dtype=torch.float64)
        self.off = torch.zeros(2, CLASSES, POINTS, dtype=torch.float64)

    def run(self, sample, known) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Exponents, magnitudes, reconstruction points and rates as `ArchiveModel` has them."""
        decoded: dict[tuple[int, int], list[Tensor]] = {}  # by quality and window: K and V of the layer below
        for layer in range(self.layers):
            of_layer = sample(layer)
            chosen = exponents(of_layer.received)
            self.seen[layer] += torch.bincount((chosen - EMERGENCY).flatten(), minlength=EXPONENTS).to(torch.int32)
            for quality, window in product(SEEN, range(min(COUNTED, len(chosen)))):
                below = decoded.get((quality, window), [])
                own: list[Tensor] = []
                for place in range(len(STREAMS)):
                    given = known[window][place] if known is not None and layer == 0 else None
                    rows = of_layer.rows[place][window]
                    own.append(self._coded(layer, place, quality, rows, chosen[window], below + own, given))
                decoded[quality, window] = own
        counts = self.by_quality.sum(0)
        smooth = _smooth(counts)
        return self.seen, smooth, self._points(counts), self._rates(smooth)

    def _coded(self, layer, place, quality, rows, exponent, below, given) -> Tensor:
        """One window's K or V coded and counted; what is decoded, as whole numbers."""
        fitted = self.streams[layer, STREAMS[place]]
        coder = StreamCoder(fitted, quality, spectrum_at(fitted, quality), torch.zeros(CLASSES, POINTS))
        predicted = coder.predicted(below, len(rows), True, given)
        components = coder.components(on_grid(rows, coder.unit) - predicted)
        index = coder.indices(components, exponent)
        found = coder.classes(exponent)
        self._count(place, SEEN.index(quality), components, index, found, log_steps(quality, exponent))
        return coder.rebuilt(index, exponent, found, predicted)

    def _count(self, place, at: int, components: Tensor, index: Tensor, found: Tensor, log_step: Tensor) -> None:
        table, low = TABLES[found.long()], LOW_BITS[found.long()]
        magnitude = (index.long() >> low).abs().clamp(max=LARGEST)
        counts = self.by_quality[at, place]
        counts += torch.bincount((table * (LARGEST + 1) + magnitude).flatten(), minlength=counts.numel()).view_as(
            counts
        )
        self.low[at] += low.sum()
        off = components.abs() * torch.exp2(-log_step.double() / OCTAVE)[:, None] - index.abs()
        cell = (table * POINTS + index.abs().clamp(max=POINTS - 1)).flatten()
        weight = torch.where(low == 0, off, 0.0).flatten()
        self.off[place] += torch.bincount(cell, weight, minlength=self.off[place].numel()).view_as(self.off[place])

    def _rates(self, smooth: Tensor) -> Tensor:
        """Bits of a value at each quality."""
        share = smooth.double() / smooth.sum(-1, keepdim=True)
        cost = -torch.log2(share)
        cost[..., 1:] += 1  # its sign
        bits = (self.by_quality * cost).sum((1, 2, 3)) + self.low
        return (bits / self.by_quality.sum((1, 2, 3)).clamp(min=1)).float()

    def _points(self, counts: Tensor) -> Tensor:
        """Mean of what indices of each magnitude stand for, over the index, in units of 2**-POINT steps."""
        last = counts[..., POINTS - 1 :].sum(-1, keepdim=True)
        number = torch.cat((counts[..., : POINTS - 1], last), dim=-1)
        mean = self.off / number.clamp(min=1) * (number >= ENOUGH)
        mean[..., 0] = 0
        return (mean.clamp(-0.5, 0.5) * (1 << POINT)).round().to(torch.int16)


def _smooth(counts: Tensor) -> Tensor:
    """Whole numbers above 0, with what neighbouring classes say, and a tail where nothing was seen."""
    beside = torch.zeros_like(counts)
    beside[:, 1:] += counts[:, :-1]
    beside[:, :-1] += counts[:, 1:]
    tail = torch.exp(-torch.arange(counts.shape[-1], dtype=torch.float64) / 8)
    both = counts + 0.3 * beside + 0.05 * tail + 1e-3
    return (both / both.sum(-1, keepdim=True) * (1 << TOTAL)).ceil().to(torch.int32)
