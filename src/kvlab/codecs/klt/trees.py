"""The tables of a layer's components, and what is left of their values where low bits of a symbol are not known."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.core.errors import CalibrationMismatch

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
                " write the file again with `kvlab calibrate`",
                code="calibration.table-size",
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


# Nearest values of many tables at once, each row of numbers with a table of its own.

CELLS = 1024  # with so many hardly a cell has two boundaries in it


class Nearest:
    """Index of the nearest value of a row's table, by a grid of cells over the table's range.

    A cell knows how many boundaries lie below it and which ones lie in it; only those are compared. A number
    and the boundaries find their cells by the same rounding, so the index is that of a search by comparison.

    Parameters
    ----------
    values : Tensor
        Ascending values of each row, float32 [rows, most]; what is after the end of a table is not looked at.
    sizes : Tensor
        How many values each row has, 1..256 [rows].
    """

    def __init__(self, values: Tensor, sizes: Tensor):
        edges, rows = (values[:, 1:] + values[:, :-1]) / 2, len(values)
        real = torch.arange(edges.shape[1])[None, :] < sizes[:, None] - 1
        low = torch.where(real, edges, torch.inf).amin(1, keepdim=True).nan_to_num(posinf=0.0)
        high = torch.where(real, edges, -torch.inf).amax(1, keepdim=True).nan_to_num(neginf=0.0)
        self.scale = (CELLS - 2) / (high - low).clamp(min=1e-6)
        self.offset = 1 - low * self.scale
        cell = self._cell(edges)
        counts = torch.zeros(rows, CELLS, dtype=torch.int64).scatter_add_(1, cell, real.long())
        below = counts.cumsum(1) - counts
        rank = torch.arange(edges.shape[1])[None, :] - below.gather(1, cell)
        self.below = below.to(torch.uint8)
        self.inside = torch.full((rows, CELLS), torch.inf, dtype=torch.float32)
        self.further: list[tuple[Tensor, Tensor]] = []
        for depth in range(int(counts.max())):
            row, column = (real & (rank == depth)).nonzero().unbind(1)
            inside = torch.full((rows, CELLS), torch.inf, dtype=torch.float32)
            inside[row, cell[row, column]] = edges[row, column]
            if depth:
                self.further.append((row.unique(), inside[row.unique()]))
            else:
                self.inside = inside

    def to(self, device: torch.device) -> Nearest:
        """Itself, moved."""
        self.scale, self.offset, self.below = (x.to(device) for x in (self.scale, self.offset, self.below))
        self.inside = self.inside.to(device)
        self.further = [(rows.to(device), inside.to(device)) for rows, inside in self.further]
        return self

    def _cell(self, z: Tensor) -> Tensor:
        return (z * self.scale).add_(self.offset).clamp_(0, CELLS - 1).long()

    def __call__(self, z: Tensor) -> Tensor:
        """Indices uint8 of finite numbers float32 [rows, n]; the lower one on a tie."""
        cell = self._cell(z)
        index = self.below.gather(1, cell)
        index += (z > self.inside.gather(1, cell)).view(torch.uint8)
        for rows, inside in self.further:  # a cell has several boundaries in few rows
            index[rows] += (z[rows] > inside.gather(1, cell[rows])).view(torch.uint8)
        return index
