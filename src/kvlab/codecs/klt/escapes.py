"""Vectors that their tables do not fit, within the same number of bits: where the bits for that lie, and what they say.

Every vector (one token of one group of heads) has one bit that says whether it was escaped. A vector that was gives up
the bits that are worth least to it, the last ones of the spending order, and these hold a count of 3 bits. A count
of 1 to 7 is followed by as many pairs of component and value. A count of 0 is followed by 5 bits: the number of the
scale that the whole vector was coded at (`scales`), or that it is coded without tables (`plain`), with all its bits.
An escape therefore never takes a byte more, and depends on no other token.

A value is stored as its signed square root in float16. That reaches 4.3e9 standard deviations to one part in two
thousand, so that a channel which was constant in the calibration, and whose deviation is therefore nothing but the
floor of `components`, is caught when it moves. Where the metric mixes channels, one that moves far moves many
components, of which those are stored that matter most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codecs.klt.bits import VALUE_BITS
from kvlab.codecs.klt.fields import COUNT_BITS, PLAIN_BITS, Said, fields_of
from kvlab.codecs.klt.plain import PlainGroup
from kvlab.codecs.klt.scales import PLAIN, SCALE_BITS, SCALES
from kvlab.codecs.klt.trees import Trees
from kvlab.codecs.stream.packing import bits_for
from kvlab.core.errors import StreamError

MOST = 7


@dataclass(frozen=True)
class Spent:
    """What was spent on one group of heads.

    Parameters
    ----------
    order : Tensor
        Components in the order in which bits were spent on them, up to the total.
    values, mass : Tensor
        Reconstruction values of each component and the probabilities of their cells, float64 [D, L]; after the
        end of a shorter table both are 0.
    deviation : Tensor
        Standard deviation of each component [D].
    width : Tensor
        Bits of each component [D].
    """

    order: Tensor
    values: Tensor
    mass: Tensor
    deviation: Tensor
    width: Tensor


class Tails:
    """Where escapes lie in vectors of all groups of a layer, how they are read and how they are written.

    Parameters
    ----------
    components : Tensor
        Those that the last bits were spent on, the last first, int16 [groups, bits that the most escapes take].
    trees : Trees
        Values of every component at every number of known bits, where the vectors will be.
    deviation : Tensor
        Standard deviation of each component in the metric, float32 [groups, width].

    Attributes
    ----------
    room : int
        Pairs that a vector can hold, 0..7.
    lost : Tensor
        Bits that each component gives up for a scale, and for 1 to `room` pairs, uint8 [groups, room + 1, width].
    start : Tensor
        Where the values of what is left of it begin in `trees.values`, int32 [groups, room + 1, width].
    plain : tuple of PlainGroup
        Vectors without tables, by group; empty where they have too few bits.
    """

    def __init__(self, components: Tensor, trees: Trees, deviation: Tensor):
        widths, device, self.trees = trees.widths, trees.values.device, trees
        self.width = widths.shape[1]
        self.index_bits = index_bits(self.width)
        self.room = room(components.shape[1], self.width)
        earlier = (components[:, :, None] == components[:, None]).tril(-1).sum(2)
        lost = lost_bits(components, self.width)
        self.start = trees.at(widths[:, None] - lost).int().to(device)
        self.lost = lost.to(torch.uint8).to(device)
        self.component, self.place = components.to(device), earlier.to(torch.uint8).to(device)
        self.scales, self.sizes = SCALES.to(device), sizes(self.room, self.width).to(device)
        self.fields = fields_of(components.shape[1], self.index_bits, self.room, device)
        self.plain: tuple[PlainGroup, ...] = ()
        if components.shape[1] >= PLAIN_BITS:
            taken = [torch.bincount(row[:PLAIN_BITS], minlength=self.width) for row in components]
            self.plain = tuple(PlainGroup(*own, device) for own in zip(widths, taken, deviation, strict=True))

    # ---------------------------------------------------------------------------------------- reading

    def read(self, group: Tensor, symbols: Tensor) -> tuple[Tensor, Tensor]:
        """What escaped vectors' symbols uint8 [v, width] say.

        Returns
        -------
        values : Tensor
            Standardised components, float32 [v, width].
        second : Tensor
            Whether they are about the second mean, bool [v].

        Raises
        ------
        StreamError
            When a vector holds more escapes than there is room for, or one that cannot be.
        """
        said = self.said(group, symbols)
        count = said.count
        if int(count.max()) > self.room:
            raise StreamError(f"a vector holds {int(count.max())} escapes where there is room for {self.room}")
        whole = count == 0
        z = self.trees.of(self.start[group, count].long(), symbols >> self.lost[group, count])
        z *= torch.where(whole, self.scales[said.number], 1.0)[:, None]
        z = self._with_pairs(z, said)
        self._put_plain(z, group, symbols, said.size, (whole & (said.number == PLAIN)).nonzero().flatten())
        return z, whole & (said.number < PLAIN)

    def said(self, group: Tensor, symbols: Tensor) -> Said:
        """What escaped vectors' symbols uint8 [v, width] say, whether or not that can be."""
        component, place = self._of(self.component, group).long(), self._of(self.place, group)
        return self.fields.read(symbols.gather(1, component) >> place & 1)

    def _of(self, x: Tensor, group: Tensor) -> Tensor:
        """Rows of x [groups, ..] for vectors of these groups; the one there is, not copied, where there is one."""
        return x[group] if len(x) > 1 else x.expand(len(group), -1)

    def _with_pairs(self, z: Tensor, said: Said) -> Tensor:
        """Components z [v, width] with the values of pairs; the last one where a forged stream names one twice."""
        there = torch.arange(self.room, device=z.device) < said.count[:, None]
        if (there & ((said.places >= self.width) | ~said.values.isfinite())).any():
            raise StreamError("an escape names a component or holds a value that cannot be")
        z, places = torch.nn.functional.pad(z, (0, 1)), torch.where(there, said.places, self.width)
        return z.scatter_(1, places, said.values)[:, : self.width]

    def _put_plain(self, z: Tensor, group: Tensor, symbols: Tensor, size: Tensor, which: Tensor) -> None:
        """Put vectors without tables into z, those of the places `which`."""
        if not len(which):
            return
        if not self.plain:
            raise StreamError("a vector says that it has no tables, and has no room for that")
        group, symbols, size = group[which], symbols[which], size[which]
        if not torch.isfinite(size).all():
            raise StreamError("a vector without tables is of a size that cannot be")
        for number, own in enumerate(self.plain):
            at = (group == number).nonzero().flatten()
            if len(at):
                z[which[at]] = own.decode(symbols[at][:, own.component.long()] >> own.place & 1, size[at])

    # ---------------------------------------------------------------------------------------- writing

    def write(self, group: Tensor, symbols: Tensor, said: Said, coefficients: Tensor) -> Tensor:
        """Symbols uint8 [v, width] of vectors of these groups [v], with what is said in the place of bits given up.

        Of vectors without tables, whose `coefficients` [p, width] are given in their order, no bit of a symbol is left.
        """
        plain = ((said.count == 0) & (said.number == PLAIN)).nonzero().flatten()
        lost, taken = self.lost[group, said.count], self.sizes[said.count]
        kept = symbols >> lost << lost
        if len(plain):
            kept[plain], taken[plain] = self._without_tables(group[plain], coefficients, said.size[plain]), PLAIN_BITS
        component, place = self._of(self.component, group).long(), self._of(self.place, group)
        bits = self.fields.write(said) * (torch.arange(component.shape[1], device=taken.device) < taken[:, None])
        return kept.scatter_add_(1, component, bits.to(torch.uint8) << place)

    def _without_tables(self, group: Tensor, coefficients: Tensor, size: Tensor) -> Tensor:
        """Symbols uint8 [v, width] of coefficients [v, width] of vectors of these sizes [v] (`plain`)."""
        symbols = torch.zeros(coefficients.shape, dtype=torch.uint8, device=size.device)
        for number, own in enumerate(self.plain):
            at = (group == number).nonzero().flatten()
            if len(at):
                bits = own.encode(coefficients[at], size[at]) << own.place
                symbols[at] = symbols[at].scatter_add_(1, own.component.long().expand(len(at), -1), bits)
        return symbols


def merged(group: Spent, lost: Tensor) -> tuple[Tensor, Tensor]:
    """Means of the cells that are left when `lost` [D] low bits of the symbols are not known.

    Float64 [D, L], by the whole symbol, and the same by what is left of it.
    """
    run = torch.arange(group.values.shape[1])[None, :] >> lost[:, None]
    weight = group.mass + 1e-12 * (group.mass.cumsum(1) < 2)  # a cell that nothing fell in still has a value
    mass = torch.zeros_like(group.values).scatter_add_(1, run, weight)
    means = torch.zeros_like(group.values).scatter_add_(1, run, weight * group.values) / mass.clamp(min=1e-300)
    return means.gather(1, run), means


def heap(group: Spent) -> Tensor:
    """Values at every number of known bits: those at w bits from place 2**w on; float32 [D, 2 L]."""
    out = torch.zeros(len(group.values), 2 * group.values.shape[1], dtype=torch.float32)
    for known in range(int(group.width.max()) + 1):
        _, means = merged(group, (group.width - known).clamp(min=0))
        exact = (group.width <= known)[:, None]
        out[:, 1 << known : 2 << known] = torch.where(exact, group.values, means)[:, : 1 << known]
    return out


def index_bits(width: int) -> int:
    """Bits that name one of `width` components."""
    return max(1, bits_for(width))


def sizes(count: int, width: int) -> Tensor:
    """Bits that a scale, and then 1, 2, ... `count` pairs take, int64 [count + 1]."""
    each = index_bits(width) + VALUE_BITS
    return torch.tensor([COUNT_BITS + SCALE_BITS, *(COUNT_BITS + number * each for number in range(1, count + 1))])


def last_spent(groups: list[Spent]) -> Tensor:
    """The components that the bits were spent on which escapes may take, the last first, int64 [groups, bits]."""
    width, total = len(groups[0].values), min(len(group.order) for group in groups)
    most = max(int(sizes(room(total, width), width).max()), min(PLAIN_BITS, total))
    return torch.stack([group.order.flip(0)[:most] for group in groups])


def lost_bits(components: Tensor, width: int) -> Tensor:
    """Bits that each component gives up for a scale, and for 1, 2, ... pairs, int64 [groups, counts, width].

    `components` are those of `last_spent`.
    """
    counts = sizes(room(components.shape[1], width), width)
    return torch.stack([torch.stack([torch.bincount(row[:n], minlength=width) for n in counts]) for row in components])


def fits(total: int) -> bool:
    """Whether a vector of `total` bits can give up enough of them for its scale."""
    return total >= COUNT_BITS + SCALE_BITS


def room(total: int, width: int) -> int:
    """Pairs that a vector of `total` bits can hold, 0..7."""
    return max(0, min(MOST, (total - COUNT_BITS) // (index_bits(width) + VALUE_BITS)))
