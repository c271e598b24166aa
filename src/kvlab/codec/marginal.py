"""The shape of one component's distribution: a sketch of it, and the Lloyd-Max tables of any width that fit it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvlab.codec.allocation import bits_of, spending_order
from kvlab.codec.quantizer import gaussian_table

POINTS = 256
PSEUDO_SAMPLES = 8192
NODES, REACH = 4096, 6.0
ROUNDS, ROUNDS_OF_WIDE = 12, 4  # of Lloyd's iteration; tables of more than 5 bits start near enough
MAX_WIDTH = 8
UNMADE = 1e300  # distortion of a table that was not made: its bits come last


def ranks(count: int) -> Tensor:
    """Quantiles of N(0, 1) at (i + 1/2) / count, float64 [count]."""
    return torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)


def sketch(samples: Tensor) -> Tensor:
    """Quantiles at (i + 1/2) / POINTS of samples mixed with as many of N(0, 1) as it takes to be sure of a shape.

    A table that is fitted to a thousand correlated tokens is worse on the next thousand than the
    Gaussian one, a table fitted to six thousand is better: hence a prior worth `PSEUDO_SAMPLES`.

    Parameters
    ----------
    samples : Tensor
        [D, n] float64, of variance 1 each.

    Returns
    -------
    Tensor
        [D, POINTS], ascending.
    """
    prior = ranks(PSEUDO_SAMPLES).to(samples).expand(samples.shape[0], -1)
    ordered = torch.cat((samples, prior), dim=1).sort(dim=1).values
    place = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS * ordered.shape[1] - 0.5
    low = place.long()
    return torch.lerp(ordered[:, low], ordered[:, low + 1], (place - low).to(ordered))


@dataclass(frozen=True)
class Tables:
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
        step = 2 * REACH / NODES
        nodes = (torch.arange(NODES, dtype=torch.float64) + 0.5) * step - REACH
        weight = torch.exp(-nodes.square() / 2)
        self.weight = weight / weight.sum()
        self.z = self.map(nodes)
        self.mass, self.first = integral(self.weight), integral(self.weight * self.z)
        self.second = (self.weight * self.z.square()).sum(-1)

    def map(self, n: Tensor, rows: Tensor | None = None) -> Tensor:
        """g at n [m] of all components or of some `rows` of them, float64 [D, m]."""
        sketches = self.sketches if rows is None else self.sketches[rows]
        at = ranks(self.sketches.shape[1])
        low = (torch.searchsorted(at, n) - 1).clamp(0, len(at) - 2)
        return torch.lerp(
            sketches[:, low], sketches[:, low + 1], (n - at[low]) / (at[low + 1] - at[low])
        )  # fmt: skip

    def table(self, width: int, rows: Tensor | None = None) -> Tables:
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
        return Tables(values, mass.expand_as(values), (self.second[rows] - (values * first).sum(1)).clamp(min=0))

    @cached_property
    def tables(self) -> tuple[Tables, ...]:
        """Tables of width 0..8."""
        return tuple(self.table(width) for width in range(MAX_WIDTH + 1))

    def distortion(self) -> Tensor:
        """Mean squared error of each component at each width [D, 9]."""
        return torch.stack([tables.distortion for tables in self.tables], dim=1)

    def spend(self, energy: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `total` bits buy for components of these energies [D]: reverse water-filling in whole bits.

        A table is made for the components only that reach its width: one that stays below it among fewer
        offers does so among more, since each further bit of a component gains no more than the one before.

        Returns
        -------
        tuple of Tensor
            Components in the order in which the bits were spent [total], bits of each [D], and each
            component's table of its own width and its cells' masses, float64 [D, 2**MAX_WIDTH], 0 behind its end.
        """
        distortion = torch.full((len(energy), MAX_WIDTH + 1), UNMADE, dtype=torch.float64)
        rows, made = torch.arange(len(energy)), []
        for width in range(MAX_WIDTH + 1):
            tables = self.table(width, rows)
            made.append((rows, tables))
            distortion[rows, width] = energy[rows] * tables.distortion
            order = spending_order(distortion)[:total]
            bits = bits_of(order, total, len(energy))
            rows = (bits >= width).nonzero().flatten() if width else rows
            if not len(rows):
                break
        values, mass = torch.zeros(2, len(energy), 1 << MAX_WIDTH, dtype=torch.float64)
        for width, (rows, tables) in enumerate(made):
            own = bits[rows] == width
            values[rows[own], : 1 << width] = tables.values[own]
            mass[rows[own], : 1 << width] = tables.mass[own]
        return order, bits, values, mass


def integral(values: Tensor) -> Tensor:
    """Running sum along the last axis, from 0."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))


def gaussian_sketch(count: int) -> Tensor:
    """The sketch of N(0, 1), float64 [count, POINTS]."""
    return ranks(POINTS).expand(count, -1)


def decibels(ratio: Tensor) -> Tensor:
    """10 log10."""
    return 10 / math.log(10) * ratio.log()
