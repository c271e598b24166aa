"""Vectors that no table was made for: coded as one would code them who knows nothing of them.

Where a vector lies so far from what the calibration saw that neither pairs nor a scale (`escapes`, `scales`) keep its
error small, its components in the metric are turned until they look Gaussian, divided by their root mean square, which
is stored, and quantised with equal bits by the tables of N(0, 1). Its error is then a known part of its own size, as
that of codecs without a calibration is (Zandieh et al. 2025, TurboQuant), whatever it looks like. All bits of the
vector are spent so, but for those that say that it is one and how large it is.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from kvlab.codecs.klt.bits import bits_of_value, low_bits, number_of, value_of
from kvlab.codecs.klt.marginal import MAX_WIDTH
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.products import product
from kvlab.codecs.shared.quantizer import gaussian_table, mse, quantise
from kvlab.codecs.shared.seeding import generator


@cache
@apart
def turn(width: int) -> Tensor:
    """An orthonormal matrix float64 [width, width] that spreads a component over all: a cosine transform after signs.

    DCT-II: Ahmed, Natarajan and Rao, Discrete Cosine Transform, 1974.
    """
    place = torch.arange(width, dtype=torch.float64)
    cosine = torch.cos(math.pi / width * (place[:, None] + 0.5) * place) * math.sqrt(2 / width)
    cosine[:, 0] /= math.sqrt(2)
    signs = torch.randint(0, 2, (width, 1), generator=generator("klt", "plain", width)) * 2 - 1
    return signs * cosine


class PlainGroup:
    """Plain vectors of one group of heads.

    Parameters
    ----------
    widths : Tensor
        Bits of each of its components, int64 [width].
    taken : Tensor
        How many of them, the lowest ones, hold something else, int64 [width].
    deviation : Tensor
        Standard deviation of each component in the metric, float32 [width].
    device : torch.device
        Where the vectors will be.

    Attributes
    ----------
    component, place : Tensor
        Where each bit of a vector lies, int16 and uint8 [bits].
    deviation : Tensor
        As given.
    unit : float
        What root mean squares are multiples of, in the metric.
    expected : float
        The part of a vector's squared size in the metric that is its error where its coefficients are Gaussian.
    """

    def __init__(self, widths: Tensor, taken: Tensor, deviation: Tensor, device: torch.device):
        left = widths - taken
        component = torch.arange(len(widths)).repeat_interleave(left)
        within = torch.arange(len(component)) - (left.cumsum(0) - left)[component]
        self.component = component.to(torch.int16).to(device)
        self.place = (within + taken[component]).to(torch.uint8).to(device)
        bits, more = divmod(len(component), len(widths))
        self.parts = [(slice(more), min(bits + 1, MAX_WIDTH)), (slice(more, None), min(bits, MAX_WIDTH))]
        none = torch.zeros(1, dtype=torch.float32)
        self.tables = [(gaussian_table(size) if size else none).float().to(device) for _, size in self.parts]
        losses = [mse(table) for table in self.tables]
        self.expected = (losses[0] * more + losses[1] * (len(widths) - more)) / len(widths)
        self.deviation, self.device = deviation, device
        self.unit = deviation.double().cpu().square().mean().sqrt().item()

    @property
    def there(self) -> Tensor:
        """From components to coefficients, float32 [width, width]; made anew, since vectors without tables are few."""
        deviation = self.deviation.double().cpu()
        return (deviation[:, None] / self.unit * turn(len(deviation))).float().to(self.device)

    @property
    def back(self) -> Tensor:
        """The way back, likewise."""
        deviation = self.deviation.double().cpu()
        return (turn(len(deviation)).mT * self.unit / deviation).float().to(self.device)

    def turned(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients of vectors of standardised components, as large as they are [v, width], and their sizes.

        The size is the root mean square in units, as it is stored, float32 [v].
        """
        coefficients = product(z, self.there)
        return coefficients, value_of(bits_of_value(coefficients.square().mean(1).sqrt()))

    def error(self, coefficients: Tensor, size: Tensor) -> Tensor:
        """Squared error in the metric if coefficients of these sizes are coded, [v]."""
        even = coefficients / size.clamp(min=1e-30)[:, None]
        apart = even - self._values(self._indices(even))
        return apart.square().sum(1) * (size * self.unit).square()

    def encode(self, coefficients: Tensor, size: Tensor) -> Tensor:
        """Bits uint8 [v, bits]."""
        indices = self._indices(coefficients / size.clamp(min=1e-30)[:, None])
        parts = [low_bits(indices[:, part], bits).flatten(1) for part, bits in self.parts]
        found = torch.cat(parts, dim=1)
        return torch.nn.functional.pad(found, (0, len(self.component) - found.shape[1]))

    def decode(self, bits: Tensor, size: Tensor) -> Tensor:
        """Standardised components float32 [v, width] of bits [v, bits]."""
        found, start = [], 0
        for part, width in self.parts:
            count = len(range(*part.indices(len(self.deviation))))
            found.append(number_of(bits[:, start : start + count * width].unflatten(1, (count, width))))
            start += count * width
        return product(self._values(torch.cat(found, dim=1)) * size[:, None], self.back)

    def _indices(self, turned: Tensor) -> Tensor:
        """Places in the tables of each coefficient [v, width]."""
        pairs = zip(self.parts, self.tables, strict=True)
        return torch.cat([quantise(turned[:, part].contiguous(), table) for (part, _), table in pairs], dim=1)

    def _values(self, indices: Tensor) -> Tensor:
        """What the tables hold there [v, width]."""
        pairs = zip(self.parts, self.tables, strict=True)
        return torch.cat([table[indices[:, part]] for (part, _), table in pairs], dim=1)
