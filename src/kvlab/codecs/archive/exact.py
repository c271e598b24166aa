"""Linear maps that come out the same on every machine: whole numbers in float64.

A decoder that predicts a layer from the one below repeats on its own machine what the encoder did on another, and
floating-point sums depend on their order, so on threads, on the BLAS and on the device. Sums of whole numbers do not,
as long as none leaves the 53 bits that float64 is exact in. Values and coefficients are therefore rounded once,
products and sums are exact, and one rounding to even, after a division by a power of two, gives the next whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.core.errors import CapabilityError

EXACT = 53  # bits
COEFFICIENT = 15  # bits of a coefficient
VALUE = 24  # bits of K and V on their grid


def power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent``, float64, by its bits: a library's exp2 need not be exact. -1022 <= exponent <= 1023."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


@dataclass(frozen=True)
class ExactMap:
    """A matrix in whole numbers: ``round(x @ coefficients * 2**-places)``.

    Parameters
    ----------
    coefficients : Tensor
        int16 [..., n, m].
    places : Tensor
        Binary places of each column, int16 [..., m].
    """

    coefficients: Tensor
    places: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> ExactMap:
        """The nearest one to a float64 matrix [..., n, m]; every column has its own places."""
        largest = torch.cat((matrix.abs(), matrix.new_full((*matrix.shape[:-2], 1, matrix.shape[-1]), 2.0**-200)), -2)
        places = COEFFICIENT - 1 - torch.frexp(largest.amax(-2)).exponent
        coefficients = (matrix * power_of_two(places)[..., None, :]).round()
        return cls(coefficients.to(torch.int16), places.to(torch.int16))

    def working(self, bits: int) -> tuple[Tensor, Tensor]:
        """Coefficients in float64, and places: what `mapped` takes, for whole numbers of so many bits.

        Raises
        ------
        CapabilityError
            Their sums could be too large to be exact.
        """
        terms = self.coefficients.shape[-2]
        if bits + COEFFICIENT + max(terms - 1, 0).bit_length() > EXACT:
            raise CapabilityError(
                f"sums of {terms} products of {bits} and {COEFFICIENT} bits are not exact in float64; archive is for"
                " models of fewer or narrower KV heads",
                code="capability.not-exact",
            )
        return self.coefficients.double(), self.places.long()


def mapped(x: Tensor, matrix: tuple[Tensor, Tensor], less: int = 0) -> Tensor:
    """Whole numbers x, float64 [..., t, n], through a matrix, float64 [..., t, m]; `less` is added to its places."""
    coefficients, places = matrix
    return rounded(x @ coefficients, places + less)


def mapped_together(parts: Sequence[Tensor], matrix: tuple[Tensor, Tensor]) -> Tensor:
    """`mapped` of parts [t, n / parts] side by side, without putting them there: sums are exact in any order."""
    coefficients, places = matrix
    total, *others = coefficients.chunk(len(parts))
    total = parts[0] @ total
    for part, own in zip(parts[1:], others, strict=True):
        total.addmm_(part, own)
    return rounded(total, places)


def rounded(sums: Tensor, places: Tensor) -> Tensor:
    """``sums * 2**-places`` [..., t, m], to the nearest whole numbers, in place; halves to even."""
    return sums.mul_(power_of_two(-places)[..., None, :]).round_()


def on_grid(x: Tensor, unit: int) -> Tensor:
    """Values over ``2**unit`` as whole numbers of `VALUE` bits, float64; larger ones become the largest."""
    most = float((1 << VALUE) - 1)
    return (x.double() * 2.0**-unit).round().clamp(-most, most)


def off_grid(x: Tensor, unit: int) -> Tensor:
    """The values, float32."""
    return (x * 2.0**unit).float()


def unit_of(largest: float, head_room: int = 6) -> int:
    """The power of two to count in, so that values 2**`head_room` times as large as the largest seen still fit."""
    return int(torch.frexp(torch.tensor(max(largest, 2.0**-100))).exponent) + head_room - VALUE
