"""The tables of a layer's components, and what is left of their values where low bits of a symbol are not known."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.base.errors import CalibrationMismatch
from kvlab.codec.klt.nearest import Nearest

MANY = 128  # vectors from which it pays to make what finds their values, rather than to search for each


class Trees:
    """Values of every component at every number of known bits, one after the other.

    Parameters
    ----------
    values : Tensor
        Of each component in turn, fewest known bits first, float32; a component of width w has 2**(w + 1) - 1 of them,
        and the last 2**w are its table, ascending.
    widths : Tensor
        Bits of each component, int64 [groups, width], on the CPU.
    device : torch.device
        Where symbols will be.

    Attributes
    ----------
    first : Tensor
        Where each component's table begins, int64 [groups, width], on the device.

    Raises
    ------
    CalibrationMismatch
        There are more values than the widths ask for, or fewer.
    """

    def __init__(self, values: Tensor, widths: Tensor, device: torch.device):
        ends = ((2 << widths.flatten()) - 1).cumsum(0)
        if len(values) != int(ends[-1]):
            raise CalibrationMismatch(
                f"the decoder's tables hold {len(values)} values where their widths ask for {int(ends[-1])};"
                " write the file again with `kvlab calibrate`"
            )
        self.widths, self.values = widths, values.to(device)
        self.first = (ends - (1 << widths.flatten())).view_as(widths).to(device)

    def at(self, known: Tensor) -> Tensor:
        """Where the values begin of which so many bits are known [groups, counts, width], int64 on the CPU."""
        return (self.first.cpu() - (1 << self.widths) + 1)[:, None] + (1 << known) - 1

    def of(self, first: Tensor, symbols: Tensor) -> Tensor:
        """What symbols stand for, float32, of the components whose tables begin at `first`."""
        return self.values.take(first + symbols)

    def table(self, group: int | slice = slice(None)) -> Tensor:
        """Tables of a group's components beside each other, made anew, float32 [.., width, most]; 0 after an end."""
        sizes = (1 << self.widths[group]).to(self.first.device)[..., None]
        place = torch.arange(int(sizes.max()), device=sizes.device)
        found = self.of(self.first[group][..., None], torch.where(place < sizes, place, 0))
        return torch.where(place < sizes, found, 0.0)

    def nearest(self, group: int, z: Tensor) -> Tensor:
        """Symbols uint8 [width, n] of the values nearest to a group's components z float32 [width, n], all finite.

        The lower one on a tie.
        """
        table, sizes = self.table(group), 1 << self.widths[group]
        if z.shape[1] >= MANY:
            return Nearest(table.cpu(), sizes).to(z.device)(z)
        edges = (table[:, 1:] + table[:, :-1]) / 2
        real = torch.arange(edges.shape[1], device=z.device) < sizes.to(z.device)[:, None] - 1
        return torch.searchsorted(torch.where(real, edges, torch.inf), z.contiguous()).to(torch.uint8)
