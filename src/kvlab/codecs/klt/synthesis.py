"""The decoder's half of `klt`: what it needs of a layer at one setting, and symbols made into tokens with that.

Mean, rotation, widths, tables, and where escapes lie: neither the sketches that tables of any rate are made from, nor
the covariance, nor the way to the components. So a decoder's file is a few times smaller than the calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.codecs.klt.escapes import Tails, heap
from kvlab.codecs.klt.halves import HalfMatrix, scratch
from kvlab.codecs.klt.planes import Planes
from kvlab.codecs.klt.trees import Trees
from kvlab.codecs.shared.grouping import joined, parted
from kvlab.codecs.shared.products import FEW

if TYPE_CHECKING:
    from kvlab.codecs.klt.escapes import Spent


@dataclass(frozen=True)
class Decoding:
    """What decodes one layer's K or V at one setting.

    Parameters
    ----------
    bits : Tensor
        `KltStream.bits` that it was made for, float64 [1].
    mean : Tensor
        float32 [heads, head_dim].
    shift : Tensor
        From there to the second mean, that of a text's first token, float32 [heads, head_dim].
    inverse : Tensor
        Standardised components as rows to tokens, float32 [groups, width, width].
    deviation : Tensor
        Standard deviation of each component in the metric, float32 [groups, width].
    widths : Tensor
        Bits of each component, uint8 [groups, width].
    tails : Tensor
        The components that the last bits were spent on, the last first, int16 [groups, bits that escapes may take];
        empty without escapes.
    trees : Tensor
        Of each component in turn its values at every number of known bits, fewest first, float32; a component of
        width w has 2**(w + 1) - 1 of them, and the last 2**w are its table.
    """

    bits: Tensor
    mean: Tensor
    shift: Tensor
    inverse: Tensor
    deviation: Tensor
    widths: Tensor
    tails: Tensor
    trees: Tensor

    @classmethod
    def of(
        cls, bits: float, means: tuple[Tensor, Tensor], inverse: Tensor, spent: list[Spent], tails: Tensor | None
    ) -> Decoding:
        """That of tables that were made, about two means; `tails` are those of the escapes, if there are any."""
        widths = torch.stack([group.width for group in spent])
        padded = torch.cat([heap(group) for group in spent])
        mean, second = means
        return cls(
            bits=torch.tensor([bits], dtype=torch.float64),
            mean=mean,
            shift=second - mean,
            inverse=inverse,
            deviation=torch.stack([group.deviation for group in spent]).float(),
            widths=widths.to(torch.uint8),
            tails=torch.empty(len(spent), 0, dtype=torch.int16) if tails is None else tails.to(torch.int16),
            trees=padded[inside(widths.flatten(), padded.shape[1])],
        )


def inside(widths: Tensor, columns: int) -> Tensor:
    """Which places 1 to 2**(width + 1) - 1 of a row are, bool [rows, columns]."""
    place = torch.arange(columns)[None]
    return (place > 0) & (place < (2 << widths.long())[:, None])


class Synthesis:
    """Symbols of a layer to its tokens.

    Rows are the components of all groups of heads one after the other, then one row of escape bits per group.

    What a `Decoding` holds is held once: the matrices and the tables are nearly all of a layer's memory.

    Attributes
    ----------
    widths : Tensor
        Bits of each component, int64 [groups, width], on the CPU.
    trees : Trees
        Their tables.
    mean : Tensor
        float32 [groups, 1, width].
    shift : Tensor
        From the mean to the second one, float32 [groups, 1, width].
    back : HalfMatrix
        Standardised components as rows to tokens [groups, width, width].
    """

    def __init__(self, decoding: Decoding, device: torch.device):
        self.bits, self.heads = decoding.bits, len(decoding.mean)
        self.groups, self.width = decoding.widths.shape
        self.rows = self.groups * self.width
        self.widths = decoding.widths.long()
        self.escaping = decoding.tails.shape[1] > 0
        flags = torch.ones(self.groups * self.escaping, dtype=torch.int64)
        self.planes = Planes(torch.cat((self.widths.flatten(), flags)), device)
        self.trees, self.deviation = Trees(decoding.trees, self.widths, device), decoding.deviation
        if self.escaping:
            self.tails = Tails(decoding.tails, self.trees, self.deviation)
        means = (joined(part[:, None], self.groups).to(device) for part in (decoding.mean, decoding.shift))
        self.mean, self.shift = means
        self.back = HalfMatrix.of(decoding.inverse, device)

    def to(self, device: torch.device) -> Synthesis:
        """The same for symbols on another device."""
        return Synthesis(self.decoding, device)

    @property
    def shape(self) -> tuple[int, int]:
        """Heads and head_dim."""
        return self.heads, self.rows // self.heads

    @property
    def inverse(self) -> Tensor:
        """The way back with `shift` as a last row, float32 [groups, width + 1, width].

        In memory that the next call in this thread is given too: use it at once, or copy it.
        """
        out = scratch("inverse", self.groups, self.width + 1, self.width, device=self.shift.device)
        self.back.full(out[:, : self.width])
        out[:, self.width :] = self.shift
        return out

    @property
    def decoding(self) -> Decoding:
        """What it was made of."""
        mean, shift = (parted(part, self.heads)[:, 0] for part in (self.mean, self.shift))
        return Decoding(
            bits=self.bits,
            mean=mean.cpu(),
            shift=shift.cpu(),
            inverse=self.back.full().cpu(),
            deviation=self.deviation,
            widths=self.widths.to(torch.uint8),
            tails=self.tails.component.cpu() if self.escaping else torch.empty(self.groups, 0, dtype=torch.int16),
            trees=self.trees.values.cpu(),
        )

    def synthesise(self, symbols: Tensor) -> Tensor:
        """The tokens float32 [heads, n, head_dim] of symbols [rows, n]; `StreamError` when escapes cannot be."""
        tokens = symbols.shape[1]
        z = self.trees.of(self.trees.first.view(-1, 1), symbols[: self.rows])
        moved = self._unescape(z, symbols) if self.escaping else None
        z = z.unflatten(0, (self.groups, -1))
        if tokens < FEW:
            z = torch.nn.functional.pad(z, (0, FEW - tokens))
        x = torch.baddbmm(self.mean, z.mT, self.inverse[:, : self.width])[:, :tokens]
        if moved is not None:
            group, token = moved
            x[group, token] += self.shift[group, 0]
        return parted(x, self.heads)

    def _unescape(self, z: Tensor, symbols: Tensor) -> tuple[Tensor, Tensor] | None:
        """Put what escaped vectors hold in the place of what their symbols seem to say.

        The group and the token of those that are about the second mean.
        """
        group, token = symbols[self.rows :].nonzero().unbind(1)
        if not len(group):
            return None
        values, second = self.tails.read(group, self.vectors(symbols)[group, :, token])
        self.vectors(z)[group, :, token] = values
        return group[second], token[second]

    def vectors(self, rows: Tensor) -> Tensor:
        """Those of all groups [groups, width, n] in the first of an array's rows [rows, n]; a view."""
        return rows[: self.rows].unflatten(0, (self.groups, -1))
