"""The Lloyd-Max tables of any width that fit the sketch of one component's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.codecs.klt.allocation import bits_of, in_turn, spending_order
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.quantizer import gaussian_table
from kvlab.codecs.shared.sketch import ranks

NODES, REACH = 4096, 6.0
ROUNDS, ROUNDS_OF_WIDE = 12, 4  # of Lloyd's iteration; tables of more than 5 bits start near enough
MAX_WIDTH = 8
UNMADE = 1e300  # distortion of a table that was not made: its bits come last


@dataclass(frozen=True)
class MarginalTables:
    """Lloyd-Max tables of one width for D components.

    Parameters
    ----------
    values, mass : Tensor
        Reconstruction values, ascending, and the probabilities of their cells, float64 [D, 2**width].
    distortion : Tensor
        Mean squared error [D].
    """

    values: Tensor
    mass: Tensor
    distortion: Tensor


class Marginals:
    """The distributions that sketches [D, S] stand for, z = g(n) with n of N(0, 1).

    g is linear between the sketch's points (and beyond the outermost two), taken at the quantiles of
    N(0, 1). The sketch of a Gaussian therefore gives the Gaussian's tables, tails included.
    """

    def __init__(self, sketches: Tensor):
        self.sketches = sketches.double().cpu()
        grid = _grid()
        self.z = _between(self.sketches, *_places(self.sketches.shape[1]))
        self.mass, self.first = grid.mass, integral(grid.weight * self.z)
        self.second = (grid.weight * self.z.square()).sum(-1)

    def map(self, n: Tensor, rows: Tensor | None = None) -> Tensor:
        """g at n [m] of all components or of some `rows` of them, float64 [D, m]."""
        sketches = self.sketches if rows is None else self.sketches[rows]
        return _between(sketches, *places(n, sketches.shape[1]))

    def table(self, width: int, rows: Tensor | None = None) -> MarginalTables:
        """Lloyd's iteration (Lloyd 1982) from the image of the Gaussian table; width 0 is the mean alone.

        Of all components, or of some `rows` [m] of them.
        """
        rows = torch.arange(len(self.sketches)) if rows is None else rows
        few = len(rows) < len(self.z)
        z, firsts = (self.z[rows], self.first[rows]) if few else (self.z, self.first)
        values = self.map(gaussian_table(width), rows) if width else firsts[:, -1:]
        for _ in range(ROUNDS if 0 < width <= 5 else ROUNDS_OF_WIDE):
            middle = ((values[:, 1:] + values[:, :-1]) / 2).contiguous()
            cut = torch.nn.functional.pad(torch.searchsorted(z, middle), (1, 0))
            cut = torch.nn.functional.pad(cut, (0, 1), value=NODES)
            mass, first = self.mass[cut].diff(dim=1), firsts.gather(1, cut).diff(dim=1)
            values = torch.where(mass > 0, first / mass.clamp(min=1e-300), values)
        return MarginalTables(
            values, mass.expand_as(values), (self.second[rows] - (values * first).sum(1)).clamp(min=0)
        )

    @cached_property
    def tables(self) -> tuple[MarginalTables, ...]:
        """Tables of width 0..8."""
        return tuple(self.table(width) for width in range(MAX_WIDTH + 1))

    def distortion(self) -> Tensor:
        """Mean squared error of each component at each width [D, 9]."""
        return torch.stack([tables.distortion for tables in self.tables], dim=1)

    def spend(
        self, energy: Tensor, totals: list[int], even: bool = False
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """What bits buy for the components of several heads: reverse water-filling in whole bits, head by head.

        A table is made for the components only that reach its width: one that stays below it among fewer
        offers does so among more, since each further bit of a component gains no more than the one before.

        Parameters
        ----------
        energy : Tensor
            Of each component, whose sketches follow each other head by head, float64 [heads, D].
        totals : list of int
            Bits of each head.
        even : bool
            Give every component the same bits instead, and what does not go round to the first ones.

        Returns
        -------
        tuple
            Per head the components in the order in which the bits were spent [total]; bits of each component
            [heads, D]; and each component's table of its own width and its cells' masses, float64
            [heads * D, 2**MAX_WIDTH], 0 after its end.
        """
        heads, dim = energy.shape
        distortion = torch.full((heads * dim, MAX_WIDTH + 1), UNMADE, dtype=torch.float64)
        rows, made = torch.arange(heads * dim), []
        for width in range(MAX_WIDTH + 1):
            tables = self.table(width, rows)
            made.append((rows, tables))
            distortion[rows, width] = energy.flatten()[rows] * tables.distortion
            offers = zip(distortion.unflatten(0, (heads, dim)), totals, strict=True)
            orders = [(in_turn(dim) if even else spending_order(own))[:total] for own, total in offers]
            bits = torch.cat([bits_of(order, total, dim) for order, total in zip(orders, totals, strict=True)])
            rows = (bits >= width).nonzero().flatten() if width else rows
            if not len(rows):
                break
        values, mass = torch.zeros(2, heads * dim, 1 << MAX_WIDTH, dtype=torch.float64)
        for width, (rows, tables) in enumerate(made):
            own = bits[rows] == width
            values[rows[own], : 1 << width] = tables.values[own]
            mass[rows[own], : 1 << width] = tables.mass[own]
        return orders, bits.view(heads, dim), values, mass


class QuantileGrid(NamedTuple):
    """The quadrature over N(0, 1): its nodes [NODES], their weights, and the running sum of these from 0."""

    nodes: Tensor
    weight: Tensor
    mass: Tensor


@cache
@apart
def _grid() -> QuantileGrid:
    step = 2 * REACH / NODES
    nodes = (torch.arange(NODES, dtype=torch.float64) + 0.5) * step - REACH
    weight = torch.exp(-nodes.square() / 2)
    weight = weight / weight.sum()
    return QuantileGrid(nodes, weight, integral(weight))


def places(n: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """Where n [m] lies among the quantiles that a sketch of so many points is taken at: point below, and part way."""
    at = ranks(points)
    low = (torch.searchsorted(at, n) - 1).clamp(0, points - 2)
    return low, (n - at[low]) / (at[low + 1] - at[low])


@cache
@apart
def _places(points: int) -> tuple[Tensor, Tensor]:
    """`places` of the nodes."""
    return places(_grid().nodes, points)


def _between(sketches: Tensor, low: Tensor, part: Tensor) -> Tensor:
    """Sketches [D, S] at `places` [m], linear in between, float64 [D, m]."""
    return torch.lerp(sketches[:, low], sketches[:, low + 1], part)


def integral(values: Tensor) -> Tensor:
    """Running sum along the last axis, from 0."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))
