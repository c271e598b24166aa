"""Which vectors are escaped, and how: by what each way would lose.

A vector gets as many pairs as save the most squared error over what the bits they take are worth: the Lagrangian
bargain of rate against distortion (Shoham and Gersho 1988) with the true price of the bits, which near the water level
theta is 2 ln 2 theta each. One that is large as a whole, or near the second mean, is tried at a scale (`scales`). Where
all that costs several times what a vector usually does, it is tried without tables (`plain`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.codecs.klt.escapes import Spent, Tails, lost_bits, merged
from kvlab.codecs.klt.fields import Said
from kvlab.codecs.klt.halves import HalfMatrix
from kvlab.codecs.klt.scales import LOUD, NEAR, PLAIN, SCALES, steps_down, steps_up
from kvlab.codecs.shared.products import product

SLACK = 1.01  # of what is looked at, since products of many vectors round otherwise than those of few
PATIENCE = 3.0  # a vector that loses so many times what is usual is tried without tables,
HOPE = 0.75  # and this part of what Gaussian coefficients would then lose


class EscapedVectors(NamedTuple):
    """Vectors that are escaped.

    Parameters
    ----------
    group, token : Tensor
        Which ones, int64 [v].
    symbols : Tensor
        What the tables make of them, uint8 [v, width].
    said : Said
        What their escapes say.
    coefficients : Tensor
        Of those without tables, in their order, float32 [p, width] (`plain`).
    """

    group: Tensor
    token: Tensor
    symbols: Tensor
    said: Said
    coefficients: Tensor

    @property
    def components(self) -> int:
        """How many components are stored apart; a vector at a scale or without tables counts as one."""
        return int(self.said.count.clamp(min=1).sum())


class ScaleTrial(NamedTuple):
    """Vectors tried at a scale: its number, -1 for none [v], and their components before that [v, width]."""

    number: Tensor
    z: Tensor


class Worth(NamedTuple):
    """What bits that were spent are worth.

    Parameters
    ----------
    energy : Tensor
        Variance of each component in the metric, float64 [groups, width].
    prices : Tensor
        Expected squared error of giving up the bits of a scale, and of 1, 2, ... pairs, float64 [groups, counts].
    usual : Tensor
        Expected squared error of a vector, float64 [groups].
    """

    energy: Tensor
    prices: Tensor
    usual: Tensor

    @classmethod
    def of(cls, groups: list[Spent], tails: Tensor) -> Worth:
        """That of tables that were made, where escapes take the bits of these components (`escapes.last_spent`)."""
        lost = lost_bits(tails, len(groups[0].width))
        prices = [[price(group, gone) for gone in row] for group, row in zip(groups, lost, strict=True)]
        return cls(
            torch.stack([group.deviation.square() for group in groups]),
            torch.tensor(prices, dtype=torch.float64),
            torch.tensor([usual(group) for group in groups], dtype=torch.float64),
        )


class Chooser:
    """Chooses for the vectors of all groups of a layer.

    Parameters
    ----------
    worth : Worth
        What the bits of each group are worth.
    tails : Tails
        Where escapes lie.
    forward : HalfMatrix
        Tokens to standardised components [groups, width, width].
    shift : Tensor
        From the first mean to the second, float32 [groups, 1, width].
    """

    def __init__(self, worth: Worth, tails: Tails, forward: HalfMatrix, shift: Tensor):
        self.tails, self.trees, self.forward, self.shift = tails, tails.trees, forward, shift
        device, energy = shift.device, worth.energy
        prices = torch.nn.functional.pad(worth.prices[:, 1:], (1, 0))
        least = prices.diff(dim=1).amin(1) if tails.room else torch.full_like(prices[:, 0], torch.inf)
        reach = (least[:, None] / energy).sqrt().float().to(device)
        most = (1 << self.trees.widths).to(device) - 1
        self.first, self.last = (self.trees.of(self.trees.first, symbols) for symbols in (0 * most, most))
        self.low, self.high = self.first - reach, self.last + reach
        self.middle, self.by_reach = ((self.low + self.high) / 2)[..., None], (2 / (self.high - self.low))[..., None]
        self.prices, self.energy = prices.float().to(device), energy.float().to(device)
        self.usual, self.price_of_scale = worth.usual.float().to(device), worth.prices[:, 0].float().to(device)
        plain = torch.tensor([own.expected for own in tails.plain], dtype=torch.float32, device=device)
        self.expected = plain * self.energy.sum(1) if tails.plain else plain
        share = self.energy / self.energy.sum(1, keepdim=True)
        sink = product(shift, forward.full().mT)
        self.share, self.toward_sink = share[:, None], 2 * share[:, None] * sink
        self.sink_square = (share * sink[:, 0].square()).sum(1, keepdim=True)
        self.scales = SCALES.to(device)

    def __call__(self, centred: Tensor, z: Tensor, symbols: Tensor) -> EscapedVectors:
        """The escapes of vectors without their mean [groups, n, width].

        Their components are z, and what the tables make of these `symbols`, both [groups, width, n].
        """
        # arithmetic, since comparing every component takes four times as long
        beyond = (z - self.middle).mul_(self.by_reach).abs_().amax(1) > 1
        level = torch.bmm(self.share, z.square())[:, 0]
        near = level - torch.bmm(self.toward_sink, z)[:, 0] + self.sink_square < SLACK * NEAR * level
        group, token = (beyond | near | (SLACK * level > LOUD)).nonzero().unbind(1)
        own, coded = z[group, :, token], symbols[group, :, token]
        level = self._level(group, own)
        cost, count, places = self._pairs(group, own)
        number = self._steps_up(level, beyond[group, token])
        about, trial = near[group, token].nonzero().flatten(), own
        if len(about):
            down, trial = self._about_sink(group[about], level[about], centred[group[about], token[about]]), own.clone()
            number[about] = torch.where(down.number >= 0, down.number, number[about])
            trial[about] = torch.where(down.number[:, None] >= 0, down.z, own[about])
        number, coded = self._scales(group, own, coded, trial, number, cost)
        plain, coefficients, plain_size = self._without_tables(group, own, level, cost)
        size = torch.zeros_like(cost)
        number[plain], size[plain] = PLAIN, plain_size
        count = torch.where(number < 0, count, 0)
        at = ((number >= 0) | (count > 0)).nonzero().flatten()
        places = places[at]
        said = Said(count[at], number[at], size[at], places, own[at].gather(1, places))
        return EscapedVectors(group[at], token[at], coded[at], said, coefficients)

    def _of(self, x: Tensor, group: Tensor) -> Tensor:
        """Rows of x [groups, ..] for vectors of these groups; the one there is, not copied, where there is one."""
        return x[group] if len(x) > 1 else x

    def _own(self, group: Tensor, number: int) -> Tensor | slice:
        """Which vectors are of one group."""
        return (group == number).nonzero().flatten() if len(self.shift) > 1 else slice(None)

    def _level(self, group: Tensor, z: Tensor) -> Tensor:
        """Levels of vectors z [v, width], row by row the same numbers however many there are [v]."""
        return (self._of(self.share[:, 0], group) * z.square()).sum(1)

    def _pairs(self, group: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What vectors z [v, width] lose with pairs worth their price, how many [v], and their components [v, room]."""
        over = z - z.clamp(self._of(self.first, group), self._of(self.last, group))
        excess = over.square_().mul_(self._of(self.energy, group))
        saved, places = excess.topk(self.tails.room, dim=1)
        worth = saved.cumsum(1) - self._of(self.prices, group)[:, 1:]
        best = torch.nn.functional.pad(worth, (1, 0)).max(1)
        return self._of(self.usual, group) + excess.sum(1) - best.values, best.indices, places

    def _steps_up(self, level: Tensor, beyond: Tensor) -> Tensor:
        """The number of the scale that vectors of these levels are large enough to be tried at, -1 for none [v]."""
        up = steps_up(level)
        return torch.where((up > 0) & (beyond | (level > LOUD)), PLAIN + up, -1)

    def _about_sink(self, group: Tensor, level: Tensor, centred: Tensor) -> ScaleTrial:
        """Vectors without the first mean [v, width], tried about the second one where that brings their level down."""
        z = torch.empty_like(centred)
        for number, matrix in enumerate(self.forward.full()):
            at = self._own(group, number)
            z[at] = product(centred[at] - self.shift[number], matrix.mT)
        left = self._level(group, z)
        return ScaleTrial(torch.where(left < NEAR * level, steps_down(left), -1), z)

    def _scales(
        self, group: Tensor, z: Tensor, symbols: Tensor, trial: Tensor, number: Tensor, cost: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The number of the scale that each vector z is better coded at, -1 for none [v], and its symbols [v, width].

        `trial` is to be tried at the scales `number`. `cost` is brought down to what each loses.
        """
        at = (number >= 0).nonzero().flatten()
        if not len(at):
            return number, symbols
        group, scale, as_is = group[at], self.scales[number[at]], symbols[at]
        trial = trial[at] / scale[:, None]
        tried = self._symbols(group, trial)
        scaled = (self._error(group, trial, tried) + self._of(self.price_of_scale, group)) * scale.square()
        unscaled = torch.minimum(self._error(group, z[at], as_is), cost[at])
        better = scaled < unscaled
        cost[at] = torch.where(better, scaled, unscaled)
        number[at] = torch.where(better, number[at], -1)
        return number, symbols.index_copy(0, at, torch.where(better[:, None], tried, as_is))

    def _without_tables(self, group: Tensor, z: Tensor, level: Tensor, cost: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Places of the vectors that lose less without tables, their coefficients and their sizes.

        Those are tried that lose much, and at least a good part of what is to be expected without tables.
        """
        if not self.tails.plain:
            return torch.empty_like(group[:0]), z[:0], cost[:0]
        hope = HOPE * level * self._of(self.expected, group)
        tried = (cost > torch.maximum(hope, PATIENCE * self._of(self.usual, group))).nonzero().flatten()
        found = [(tried[:0], z[:0], cost[:0])]
        for number, own in enumerate(self.tails.plain if len(tried) else ()):
            at = tried[self._own(group[tried], number)]
            if len(at):
                coefficients, size = own.turned(z[at])
                better = own.error(coefficients, size) < cost[at]
                found.append((at[better], coefficients[better], size[better]))
        return tuple(map(torch.cat, zip(*found, strict=True)))

    def _symbols(self, group: Tensor, z: Tensor) -> Tensor:
        """What the tables make of vectors z, uint8 [v, width]."""
        symbols = torch.empty_like(z, dtype=torch.uint8)
        for number in range(len(self.shift)):
            at = self._own(group, number)
            symbols[at] = self.trees.nearest(number, z[at].mT.contiguous()).mT
        return symbols

    def _error(self, group: Tensor, z: Tensor, symbols: Tensor) -> Tensor:
        """Squared error of vectors z by the tables' symbols [v, width], [v]."""
        apart = z - self.trees.of(self._of(self.trees.first, group), symbols)
        return (apart.square_() * self._of(self.energy, group)).sum(1)


def price(group: Spent, lost: Tensor) -> float:
    """Expected squared error of giving up bits: values are means of their cells, so the parts add up."""
    means, _ = merged(group, lost)
    worse = (group.mass * (group.values - means).square()).sum(1)
    return (worse * group.deviation.square()).sum().item()


def usual(group: Spent) -> float:
    """Expected squared error of a vector: what its tables leave of a variance of 1."""
    left = (1 - (group.mass * group.values.square()).sum(1)).clamp(min=0)
    return (left * group.deviation.square()).sum().item()
