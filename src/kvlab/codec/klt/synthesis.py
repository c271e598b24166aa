"""The decoder's half of `klt`: what it needs of a layer at one setting, and symbols made into tokens with that.

Mean, rotation, widths, tables, and where escapes lie: neither the sketches that tables of any rate are made from, nor
the covariance, nor the way to the components. So a decoder's file is a few times smaller than the calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.base.errors import CalibrationMismatch
from kvlab.codec.klt.escapes import Tails, heap
from kvlab.codec.klt.grouping import joined, parted
from kvlab.codec.klt.planes import Planes
from kvlab.codec.products import FEW

if TYPE_CHECKING:
    from kvlab.codec.klt.escapes import Spent


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

    def padded(self) -> Tensor:
        """Values by 1 followed by the known bits, float32 [groups * width, 2**(widest + 1)]; 0 where none is."""
        widths = self.widths.flatten().long()
        out = torch.zeros(len(widths), 2 << int(widths.max()), dtype=torch.float32)
        there = inside(widths, out.shape[1])
        if len(self.trees) != int(there.sum()):
            raise CalibrationMismatch(
                f"the decoder's tables hold {len(self.trees)} values where their widths ask for {int(there.sum())};"
                " write the file again with `kvlab calibrate`"
            )
        out[there] = self.trees
        return out


def inside(widths: Tensor, columns: int) -> Tensor:
    """Which places 1 to 2**(width + 1) - 1 of a row are, bool [rows, columns]."""
    place = torch.arange(columns)[None]
    return (place > 0) & (place < (2 << widths.long())[:, None])


class Synthesis:
    """Symbols of a layer to its tokens.

    Rows are the components of all groups of heads one after the other, then one row of escape bits per group.
    """

    def __init__(self, decoding: Decoding, device: torch.device):
        self.heads = len(decoding.mean)
        self.groups, self.width = decoding.widths.shape
        self.rows = self.groups * self.width
        self.widths = decoding.widths.long()
        self.escaping = decoding.tails.shape[1] > 0
        flags = torch.ones(self.groups * self.escaping, dtype=torch.int64)
        self.planes = Planes(torch.cat((self.widths.flatten(), flags)), device)
        values = decoding.padded()
        self.sizes = 1 << self.widths.flatten()
        place = torch.arange(int(self.sizes.max()))[None]
        at = (self.sizes[:, None] + place).clamp(max=values.shape[1] - 1)
        self.table = torch.where(place < self.sizes[:, None], values.gather(1, at), 0.0).to(device)
        if self.escaping:
            self.tails = Tails(decoding.tails.long(), self.widths, values, decoding.deviation, device)
        self.mean, self.shift = (
            joined(part[:, None], self.groups).to(device) for part in (decoding.mean, decoding.shift)
        )
        self.inverse = decoding.inverse.to(device)

    def synthesise(self, symbols: Tensor) -> Tensor:
        """The tokens float32 [heads, n, head_dim] of symbols [rows, n]; `StreamError` when escapes cannot be."""
        tokens = symbols.shape[1]
        z = self.table.gather(1, symbols[: self.rows].long())
        moved = self._unescape(z, symbols) if self.escaping else None
        z = z.unflatten(0, (self.groups, -1))
        if tokens < FEW:
            z = torch.nn.functional.pad(z, (0, FEW - tokens))
        x = torch.baddbmm(self.mean, z.mT, self.inverse)[:, :tokens]
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
