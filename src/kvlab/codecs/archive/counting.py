"""How often indices come out as they do: a sample, coded at several qualities."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from kvlab.codecs.archive.exact import on_grid
from kvlab.codecs.archive.layer import POINTS, LayerCoder, StreamModel
from kvlab.codecs.archive.model import SEEN, STREAMS, spectrum_at
from kvlab.codecs.archive.steps import EMERGENCY, OCTAVE, POINT, exponents, log_steps
from kvlab.codecs.archive.symbols import CLASSES, EXPONENTS, LARGEST, LOW_BITS, TABLES

COUNTED = 4  # windows of the sample that are coded
ENOUGH = 50  # indices that a reconstruction point is fitted on
TOTAL = 20  # bits of a table's counts


@dataclass(frozen=True)
class LayerSample:
    """What was seen of one layer on a few windows.

    Parameters
    ----------
    rows : tuple of Tensor
        K and V, heads joined, float32 [windows, tokens, width] each; tokens follow each other from a text's first.
    expected : Tensor
        Squared attention that each token may expect, see `steps.exponents` [windows, tokens].
    """

    rows: tuple[Tensor, Tensor]
    expected: Tensor


class Counting:
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
            chosen = exponents(of_layer.expected)
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
        coder = LayerCoder(fitted, quality, spectrum_at(fitted, quality), torch.zeros(CLASSES, POINTS))
        predicted = coder.predicted(below, len(rows), True, given)
        components = coder.components(on_grid(rows, coder.unit) - predicted)
        index = coder.indices(components, exponent)
        found = coder.classes(exponent)
        self._count(place, SEEN.index(quality), components, index, found, log_steps(quality, exponent))
        return coder.rebuilt(coder.grid(index, exponent, found), predicted)

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
