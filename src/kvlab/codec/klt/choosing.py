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

from kvlab.codec.klt.escapes import Spent, Tails, merged
from kvlab.codec.klt.nearest import Nearest
from kvlab.codec.klt.scales import LOUD, NEAR, PLAIN, SCALES, steps_down, steps_up
from kvlab.codec.products import product

SLACK = 1.01  # of what is looked at, since products of many vectors round otherwise than those of few
PATIENCE = 3.0  # a vector that loses so many times what is usual is tried without tables


class Pairs(NamedTuple):
    """Vectors with components stored apart: group, token and how many [v]; which ones, and their values [v, room]."""

    group: Tensor
    token: Tensor
    count: Tensor
    places: Tensor
    values: Tensor


class Scaled(NamedTuple):
    """Vectors at a scale: group, token and the scale's number [v]; what the tables code of them [v, width]."""

    group: Tensor
    token: Tensor
    number: Tensor
    z: Tensor


class Untabled(NamedTuple):
    """Vectors without tables: group, token [v], coefficients [v, width] and their sizes [v] (`plain`)."""

    group: Tensor
    token: Tensor
    coefficients: Tensor
    size: Tensor


class Chooser:
    """Chooses for the vectors of all groups of a layer.

    Parameters
    ----------
    groups : list of Spent
        What was spent on each group.
    tails : Tails
        Where escapes lie.
    table : Tensor
        Ascending values of each component, float32 [groups, width, most].
    nearest : tuple of Nearest
        What finds the places in them, by group.
    forward : Tensor
        Tokens to standardised components, float32 [groups, width, width].
    shift : Tensor
        From the first mean to the second, float32 [groups, 1, width].
    """

    def __init__(
        self, groups: list[Spent], tails: Tails, table: Tensor, nearest: tuple[Nearest, ...], forward, shift: Tensor
    ):
        self.tails, self.table, self.nearest, self.forward, self.shift = tails, table, nearest, forward, shift
        self.width, device = table.shape[1], table.device
        energy = torch.stack([group.deviation.square() for group in groups])
        prices = torch.tensor(
            [
                [0.0, *(price(group, gone) for gone in row[1:])]
                for group, row in zip(groups, tails.lost_bits, strict=True)
            ],
            dtype=torch.float64,
        )
        least = prices.diff(dim=1).amin(1) if tails.room else torch.full((len(groups),), torch.inf, dtype=torch.float64)
        reach = (least[:, None] / energy).sqrt().float().to(device)
        ends = torch.stack([group.width for group in groups]).to(device)
        self.first, self.last = table[..., 0], table.gather(2, (1 << ends)[..., None] - 1)[..., 0]
        self.low, self.high = (self.first - reach)[..., None], (self.last + reach)[..., None]
        self.prices, self.energy = prices.float().to(device), energy.float().to(device)
        self.usual = torch.tensor([usual(group) for group in groups], device=device)
        scaling = zip(groups, tails.lost_bits, strict=True)
        self.price_of_scale = torch.tensor([price(group, row[0]) for group, row in scaling], device=device)
        share = self.energy / self.energy.sum(1, keepdim=True)
        sink = product(shift, forward.mT)
        self.share, self.toward_sink = share[:, None], 2 * share[:, None] * sink
        self.sink_square = (share * sink[:, 0].square()).sum(1, keepdim=True)
        self.scales = SCALES.to(device)

    def __call__(self, z: Tensor, centred: Tensor) -> tuple[Pairs, Scaled, Untabled]:
        """The escapes of vectors without their mean [groups, n, width], whose components are z [groups, width, n]."""
        beyond = ((z < self.low) | (z > self.high)).any(1)
        level = torch.bmm(self.share, z.square())[:, 0]
        near = level - torch.bmm(self.toward_sink, z)[:, 0] + self.sink_square < SLACK * NEAR * level
        group, token = (beyond | near | (SLACK * level > LOUD)).nonzero().unbind(1)
        own = z[group, :, token]
        number = self._steps_up(group, own, beyond[group, token])
        cost, count, places = self._pairs(group, own)
        about = near[group, token].nonzero().flatten()
        number, scaled = self._scales(group, own, number, about, centred[group[about], token[about]], cost)
        plain, coefficients, size = self._without_tables(group, own, cost)
        untabled = Untabled(group[plain], token[plain], coefficients, size)
        number[plain], count[plain] = PLAIN, 0
        at = ((number >= 0) & (number != PLAIN)).nonzero().flatten()
        large = Scaled(group[at], token[at], number[at], scaled[at])
        at = ((number < 0) & (count > 0)).nonzero().flatten()
        return Pairs(group[at], token[at], count[at], places[at], own[at].gather(1, places[at])), large, untabled

    def _pairs(self, group: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What vectors z [v, width] lose with pairs worth their price, how many [v], and their components [v, room]."""
        over = z - z.clamp(self._of(self.first, group), self._of(self.last, group))
        excess = over.square_().mul_(self._of(self.energy, group))
        saved, places = excess.topk(min(self.tails.room, self.width), dim=1)
        worth = saved.cumsum(1) - self._of(self.prices, group)[:, 1 : saved.shape[1] + 1]
        best = torch.nn.functional.pad(worth, (1, 0)).max(1)
        return self.usual[group] + excess.sum(1) - best.values, best.indices, places

    def _of(self, x: Tensor, group: Tensor) -> Tensor:
        """Rows of x [groups, ..] for vectors of these groups; the one there is, not copied, where there is one."""
        return x[group] if len(x) > 1 else x

    def _level(self, group: Tensor, z: Tensor) -> Tensor:
        """Levels of vectors z [v, width], row by row the same numbers however many there are [v]."""
        return (self._of(self.share[:, 0], group) * z.square()).sum(1)

    def _steps_up(self, group: Tensor, z: Tensor, beyond: Tensor) -> Tensor:
        """The number of the scale that vectors z [v, width] are large enough to be tried at, -1 for none [v]."""
        level = self._level(group, z)
        up = steps_up(level)
        return torch.where((up > 0) & (beyond | (level > LOUD)), PLAIN + up, -1)

    def _scales(
        self, group: Tensor, z: Tensor, number: Tensor, near: Tensor, centred: Tensor, cost: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The number of the scale that each vector is better coded at, -1 for none [v], and z at it [v, width].

        `number` is what to try. The vectors of the places `near`, `centred` without the first mean, are tried about the
        second one. `cost` is brought down to what each loses.
        """
        trial = z.clone() if len(near) else z
        for own, matrix in enumerate(self.forward if len(near) else ()):
            here = group[near] == own
            at = near[here]
            about = product(centred[here] - self.shift[own], matrix.mT)
            left = self._level(group[at], about)
            down = steps_down(left)
            closer = (down >= 0) & (left < NEAR * self._level(group[at], z[at]))
            number[at] = torch.where(closer, down, number[at])
            trial[at] = torch.where(closer[:, None], about, trial[at])
        at = (number >= 0).nonzero().flatten()
        group, scale = group[at], self.scales[number[at]]
        trial = trial[at] / scale[:, None]
        as_is = self._error(group, z[at])
        scaled = (self._error(group, trial) + self.price_of_scale[group]) * scale.square()
        as_is = torch.minimum(as_is, cost[at])
        better = scaled < as_is
        cost[at] = torch.where(better, scaled, as_is)
        number[at] = torch.where(better, number[at], -1)
        out = torch.empty_like(z)
        out[at] = trial  # of the others nothing is asked
        return number, out

    def _without_tables(self, group: Tensor, z: Tensor, cost: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Places of the vectors that lose less without tables, their coefficients and their sizes."""
        tried = (cost > PATIENCE * self.usual[group]).nonzero().flatten()
        found = [(tried[:0], z[:0], cost[:0])]
        for number, own in enumerate(self.tails.plain):
            at = tried[group[tried] == number]
            if len(at):
                coefficients, size = own.turned(z[at])
                better = own.error(coefficients, size) < cost[at]
                found.append((at[better], coefficients[better], size[better]))
        return tuple(map(torch.cat, zip(*found, strict=True)))

    def _error(self, group: Tensor, z: Tensor) -> Tensor:
        """Squared error of vectors z [v, width] by their tables alone [v]."""
        error = torch.empty_like(z[:, 0])
        for number, (nearest, table) in enumerate(zip(self.nearest, self.table, strict=True)):
            at = (group == number).nonzero().flatten()
            own = z[at].mT.contiguous()
            apart = own - table.gather(1, nearest(own).long())
            error[at] = (apart.square() * self.energy[number, :, None]).sum(0)
        return error


def price(group: Spent, lost: Tensor) -> float:
    """Expected squared error of giving up bits: values are means of their cells, so the parts add up."""
    means, _ = merged(group, lost)
    worse = (group.mass * (group.values - means).square()).sum(1)
    return (worse * group.deviation.square()).sum().item()


def usual(group: Spent) -> float:
    """Expected squared error of a vector: what its tables leave of a variance of 1."""
    left = (1 - (group.mass * group.values.square()).sum(1)).clamp(min=0)
    return (left * group.deviation.square()).sum().item()
