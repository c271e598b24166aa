"""Nearest values of many tables at once, each row of numbers with a table of its own."""

from __future__ import annotations

import torch
from torch import Tensor

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
