"""K or V of one layer: what predicts it, and the components of what is left."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvlab.codecs.archive import steps
from kvlab.codecs.archive.exact import VALUE, ExactMap, mapped, mapped_together, on_grid
from kvlab.codecs.archive.steps import EMERGENCY, MOST_COMPONENT, OCTAVE, POINT
from kvlab.codecs.archive.symbols import EXPONENTS, LOW_BITS, MOST_INDEX, TABLES, classes
from kvlab.core.errors import CalibrationMismatch

DEAD = 0.1  # of a step, by which the zone around zero is wider on either side
ENCODES_NOT = (
    "the calibration holds what decodes alone, and a cache is to be encoded; give the whole file that"
    " `kvlab calibrate` wrote"
)
POINTS = 4  # magnitudes 0, 1, 2 and 3 or more have reconstruction points of their own


@dataclass(frozen=True)
class StreamModel:
    """What was fitted for one layer's K or V; all but `forward` is whole numbers, and decodes.

    Values are counted in ``2**unit``, heads joined: width = kv_heads * head_dim.

    Parameters
    ----------
    unit : Tensor
        int16 [1].
    first : Tensor
        The mean at the first token of a text, int32 [kv_heads, head_dim].
    offset : Tensor
        What is predicted where all that it is predicted from is zero, int32 [width].
    coefficients, places : Tensor
        `ExactMap` from what it is predicted from, int16 [n, width] and [width]: K and V of the layer below, then, for
        V, K of the same layer. ``n`` is 0 where it is the mean that is predicted.
    forward : Tensor
        KLT of what is left, float32 [groups, group width, group width], in the metric whose unit is the nat.
    inverse, inverse_places : Tensor
        `ExactMap` of its inverse, of ``2**unit``.
    spectrum : Tensor
        log2 of the components' deviations in 64ths of an octave, int16 [qualities, width], at every octave of quality
        of `model.SPECTRA`.
    """

    unit: Tensor
    first: Tensor
    offset: Tensor
    coefficients: Tensor
    places: Tensor
    forward: Tensor
    inverse: Tensor
    inverse_places: Tensor
    spectrum: Tensor

    @property
    def heads(self) -> int:
        """KV heads."""
        return len(self.first)


class LayerCoder:
    """Predicts, analyses and rebuilds rows of one layer's K or V at one quality.

    Parameters
    ----------
    fitted : StreamModel
    quality : int
        See `steps`.
    spectrum : Tensor
        That of the quality, int32 [width].
    points : Tensor
        What reconstruction points are off their indices by, in units of ``2**-8`` steps, int16 [tables, `POINTS`].
    """

    def __init__(self, fitted: StreamModel, quality: int, spectrum: Tensor, points: Tensor):
        self.fitted, self.quality, self.spectrum = fitted, quality, spectrum
        self._points = _both_signs(torch.where(LOW_BITS[:, None] == 0, points[TABLES], 0).double())  # of each class
        self.unit, self.groups = int(fitted.unit), len(fitted.inverse)
        self._prediction = ExactMap(fitted.coefficients, fitted.places).working(VALUE)
        self._inverse = ExactMap(fitted.inverse, fitted.inverse_places).working(MOST_COMPONENT)

    @cached_property
    def _forward(self) -> Tensor:
        """To components, from whole numbers; only the encoder needs it."""
        if not self.fitted.forward.numel():
            raise CalibrationMismatch(ENCODES_NOT, code="calibration.decoder-only")
        return self.fitted.forward.double() * 2.0**self.unit

    @cached_property
    def _classes(self) -> Tensor:
        """Those of a token of each exponent [EXPONENTS, width]: there are few, and many tokens."""
        every = torch.arange(EMERGENCY, EMERGENCY + EXPONENTS, dtype=torch.int32)
        return classes(self.spectrum, steps.log_steps(self.quality, every))

    def predicted(self, below: list[Tensor], rows: int, starts: bool, given: Tensor | None = None) -> Tensor:
        """Whole numbers, float64 [rows, width].

        Parameters
        ----------
        below : list of Tensor
            Decoded streams that it is predicted from, whole numbers [rows, width] each.
        starts : bool
            Whether the first row is a text's first token.
        given : Tensor, optional
            What it is predicted to be, where that is known otherwise, float64 [rows, width].
        """
        if given is not None:
            return on_grid(given, self.unit)
        if len(self.fitted.coefficients):
            found = mapped_together(below, self._prediction).add_(self.fitted.offset)
        else:
            found = self.fitted.offset.double().repeat(rows, 1)
        if starts:
            found[0] = self.fitted.first.flatten().double()
        return found

    def components(self, left: Tensor) -> Tensor:
        """Components of what is left [rows, width], in roots of nats, float64 [rows, width]."""
        grouped = left.unflatten(1, (self.groups, -1)).transpose(0, 1)
        return torch.bmm(grouped, self._forward).transpose(0, 1).flatten(1)

    def indices(self, components: Tensor, exponent: Tensor) -> Tensor:
        """The index of each component, int32 [rows, width]; beyond what can be written where `exponent` is too fine."""
        size = torch.exp2(steps.log_steps(self.quality, exponent).double() / OCTAVE)
        ratio = components / size[:, None]
        return (ratio.sign() * (ratio.abs() + (0.5 - DEAD)).floor()).clamp(-(2.0**30), 2.0**30).int()

    def classes(self, exponent: Tensor) -> Tensor:
        """The class of each index [rows, width]; see `symbols`."""
        return self._classes[exponent.long() - EMERGENCY]

    def grid(self, index: Tensor, exponent: Tensor, found: Tensor) -> Tensor:
        """Components that indices of classes `found` stand for, on the grid of `steps.rebuilt` [rows, width]."""
        near = index.clamp(1 - POINTS, POINTS - 1).add_(POINTS - 1)
        shift = self._points.index_select(0, near.add_(found, alpha=2 * POINTS - 1).flatten()).view(index.shape)
        return steps.rebuilt(shift.add_(index, alpha=1 << POINT), self.quality, exponent)

    def left(self, grid: Tensor) -> Tensor:
        """What components on their grid add to what was predicted, whole numbers in float64 [rows, width]."""
        grouped = grid.unflatten(1, (self.groups, -1)).transpose(0, 1)
        return mapped(grouped, self._inverse, steps.places_of(self.quality)).transpose(0, 1).flatten(1)

    def rebuilt(self, grid: Tensor, predicted: Tensor) -> Tensor:
        """The rows that components on their grid stand for, whole numbers in float64 [rows, width]."""
        most = float((1 << VALUE) - 1)
        return predicted.add_(self.left(grid)).clamp_(-most, most)


def _both_signs(points: Tensor) -> Tensor:
    """Of magnitudes 0, 1, ... [classes, POINTS], those of indices from the least to the largest, flat."""
    return torch.cat((-points.flip(1)[:, :-1], points), 1).flatten()


def coarser(index: Tensor, exponent: Tensor) -> Tensor:
    """Exponents at which every index of a row can be written; those given where they can."""
    most = index.abs().amax(1)
    over = torch.log2((most.double() / MOST_INDEX).clamp(min=1.0)).mul(2).ceil().long()
    return torch.where(over > 0, (exponent - over - 1).clamp(min=EMERGENCY), exponent)
