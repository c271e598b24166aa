"""Components far outside their tables, stored apart within the same number of bits.

Every vector (one token of one head) has one bit that says whether it was escaped. A vector that was gives up the
bits that are worth least to it, the last ones of the spending order, and these hold up to 8 pairs of component and
value instead. An escape therefore never takes a byte more, and depends on no other token. A vector gets as many
escapes as save the most squared error over what the bits they take are worth: the Lagrangian bargain of rate
against distortion (Shoham and Gersho 1988) with the true price of the bits, which near the water level
theta is 2 ln 2 theta each.

A value is stored as its signed square root in float16. That reaches 4.3e9 standard deviations to one part in two
thousand, so that a channel which was constant in the calibration, and whose deviation is therefore nothing but the
floor of `components`, is caught when it moves. Where the metric mixes channels, one that moves far moves many
components, of which those are stored that matter most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.base.errors import StreamError
from kvlab.codec.stream.packing import bits_for

COUNT_BITS, VALUE_BITS, MOST = 3, 16, 8
LARGEST = 65504.0  # of float16; its square, in standard deviations, is what is stored of anything further out


@dataclass(frozen=True)
class Spent:
    """What was spent on one head.

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
    """Where escapes lie in vectors of all heads of a layer, and how they are read.

    Parameters
    ----------
    components : Tensor
        Those that the last bits were spent on, the last first, int64 [heads, bits that the most escapes take].
    widths : Tensor
        Bits of each component [heads, head_dim].
    values : Tensor
        Those of every component at every number of known bits, as `heap` has them, float32 [heads * head_dim, 2 L].
    device : torch.device
        Where the vectors will be.
    """

    def __init__(self, components: Tensor, widths: Tensor, values: Tensor, device: torch.device):
        self.head_dim = widths.shape[1]
        self.index_bits = index_bits(self.head_dim)
        self.room = (components.shape[1] - COUNT_BITS) // (self.index_bits + VALUE_BITS)
        self.sizes = sizes(self.room, self.head_dim)
        earlier = (components[:, :, None] == components[:, None]).tril(-1).sum(2)
        lost = [[torch.bincount(row[:size], minlength=self.head_dim) for size in self.sizes] for row in components]
        self.lost_bits = torch.stack([torch.stack(row) for row in lost])
        row = torch.arange(len(values)).view(len(widths), 1, -1)
        left = widths[:, None] - self.lost_bits
        self.start = (row * values.shape[1] + (1 << left)).to(device)
        self.heap, self.lost = values.to(device), self.lost_bits.to(torch.uint8).to(device)
        self.component, self.place = components.to(device), earlier.to(torch.uint8).to(device)

    def read(self, head: Tensor, symbols: Tensor) -> Tensor:
        """Standardised components float32 [v, D] of escaped vectors' symbols uint8 [v, D].

        Raises
        ------
        StreamError
            When a vector holds more escapes than there is room for, or one that cannot be.
        """
        bits = symbols.gather(1, self.component[head]) >> self.place[head] & 1
        count = number_of(bits[:, :COUNT_BITS]) + 1
        if int(count.max()) > self.room:
            raise StreamError(f"a vector holds {int(count.max())} escapes where there is room for {self.room}")
        pairs = bits[:, COUNT_BITS:].unflatten(1, (self.room, -1))
        there = torch.arange(self.room, device=bits.device) < count[:, None]
        place = torch.where(there, number_of(pairs[..., : self.index_bits]), -1)
        value = number_of(pairs[..., self.index_bits :]).to(torch.int16).view(torch.float16).float()
        if int(place.max()) >= self.head_dim or not torch.isfinite(value[there]).all():
            raise StreamError("an escape names a component or holds a value that cannot be")
        value = value * value.abs()
        z = self.heap.take(self.start[head, count] + (symbols >> self.lost[head, count]))
        for pair in range(int(count.max())):  # one after the other: a forged stream may name a component twice
            at = there[:, pair].nonzero().flatten()
            z[at, place[at, pair]] = value[at, pair]
        return z


class Escapes:
    """Escapes of the vectors of all heads of a layer, as the encoder chooses and writes them.

    Parameters
    ----------
    heads : list of Spent
        What was spent on each head.
    tails : Tails
        Where they lie.
    device : torch.device
        Where the vectors will be.
    """

    def __init__(self, heads: list[Spent], tails: Tails, device: torch.device):
        self.tails, self.head_dim, self.room = tails, tails.head_dim, tails.room
        price = [[self._price(head, gone) for gone in row] for head, row in zip(heads, tails.lost_bits, strict=True)]
        energy = torch.stack([head.deviation.square() for head in heads])
        self.price = torch.tensor(price, dtype=torch.float64)
        self.reach = (self.price.diff(dim=1).amin(1)[:, None] / energy).sqrt().float().view(-1, 1).to(device)
        self.price, self.energy = self.price.to(device), energy.flatten().to(device)
        self.sizes = tails.sizes.to(device)

    @staticmethod
    def _price(head: Spent, lost: Tensor) -> float:
        """Expected squared error of giving up bits: values are means of their cells, so the parts add up."""
        means, _ = merged(head, lost)
        worse = (head.mass * (head.values - means).square()).sum(1)
        return (worse * head.deviation.square()).sum().item()

    def choose(self, vector: Tensor, row: Tensor, excess: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The escapes that are worth their price.

        Parameters
        ----------
        vector : Tensor
            Which vector each suspect is of, head * n + token of n tokens [m].
        row : Tensor
            Its row, head * head_dim + component [m].
        excess : Tensor
            How far it is from its table, in standard deviations [m].

        Returns
        -------
        tuple of Tensor
            The escaped vectors [v], how many escapes each has [v], and their components, -1 for none [v, room].
        """
        saving = excess.double().square() * self.energy[row]
        order = saving.argsort(descending=True, stable=True)
        order = order[vector[order].argsort(stable=True)]
        vector, row, saving = vector[order], row[order], saving[order]
        vectors, index, runs = vector.unique_consecutive(return_inverse=True, return_counts=True)
        rank = torch.arange(len(vector), device=vector.device) - (runs.cumsum(0) - runs)[index]
        kept = rank < self.room
        saved = torch.full((len(vectors), self.room), -torch.inf, dtype=torch.float64, device=vector.device)
        places = torch.full((len(vectors), self.room), -1, device=vector.device)
        saved[index[kept], rank[kept]] = saving[kept]
        places[index[kept], rank[kept]] = row[kept] % self.head_dim
        head = row[runs.cumsum(0) - 1] // self.head_dim
        best = (saved.cumsum(1) - self.price[head, 1:]).max(1)
        worth = best.values > 0
        return vectors[worth], best.indices[worth] + 1, places[worth]

    def write(self, head: Tensor, symbols: Tensor, count: Tensor, places: Tensor, values: Tensor) -> Tensor:
        """Symbols uint8 [v, D] of vectors of the given heads [v], escapes in place of the bits given up.

        Parameters
        ----------
        count, places : Tensor
            As from `choose`.
        values : Tensor
            The standardised components in these places [v, room].
        """
        value = (values.sign() * values.abs().sqrt().clamp(max=LARGEST)).half().view(torch.int16)
        pairs = torch.cat(
            (low_bits(places.clamp(min=0), self.tails.index_bits), low_bits(value.int(), VALUE_BITS)), dim=2
        )
        bits = torch.cat((low_bits(count - 1, COUNT_BITS), pairs.flatten(1)), dim=1)
        bits *= torch.arange(bits.shape[1], device=bits.device) < self.sizes[count][:, None]
        lost = self.tails.lost[head, count]
        return (symbols >> lost << lost).scatter_add_(1, self.tails.component[head], bits << self.tails.place[head])


def merged(head: Spent, lost: Tensor) -> tuple[Tensor, Tensor]:
    """Means of the cells that are left when `lost` [D] low bits of the symbols are not known.

    Float64 [D, L], by the whole symbol, and the same by what is left of it.
    """
    run = torch.arange(head.values.shape[1])[None, :] >> lost[:, None]
    weight = head.mass + 1e-12 * (head.mass.cumsum(1) < 2)  # a cell that nothing fell in still has a value
    mass = torch.zeros_like(head.values).scatter_add_(1, run, weight)
    means = torch.zeros_like(head.values).scatter_add_(1, run, weight * head.values) / mass.clamp(min=1e-300)
    return means.gather(1, run), means


def heap(head: Spent) -> Tensor:
    """Values at every number of known bits: those at w bits from place 2**w on; float32 [D, 2 L]."""
    out = torch.zeros(len(head.values), 2 * head.values.shape[1])
    for known in range(int(head.width.max()) + 1):
        _, means = merged(head, (head.width - known).clamp(min=0))
        exact = (head.width <= known)[:, None]
        out[:, 1 << known : 2 << known] = torch.where(exact, head.values, means)[:, : 1 << known]
    return out


def index_bits(head_dim: int) -> int:
    """Bits that name one of `head_dim` components."""
    return max(1, bits_for(head_dim))


def sizes(count: int, head_dim: int) -> Tensor:
    """Bits that 0, 1, ... `count` escapes take, int64 [count + 1]."""
    each = index_bits(head_dim) + VALUE_BITS
    return torch.tensor([0, *(COUNT_BITS + number * each for number in range(1, count + 1))])


def last_spent(heads: list[Spent]) -> Tensor:
    """The components that the bits were spent on which escapes may take, the last first, int64 [heads, bits]."""
    head_dim = len(heads[0].values)
    most = int(sizes(room(min(len(head.order) for head in heads), head_dim), head_dim)[-1])
    return torch.stack([head.order.flip(0)[:most] for head in heads])


def room(total: int, head_dim: int) -> int:
    """Escapes that a vector of `total` bits can hold, 0..8."""
    return max(0, min(MOST, (total - COUNT_BITS) // (index_bits(head_dim) + VALUE_BITS)))


def low_bits(numbers: Tensor, width: int) -> Tensor:
    """The lowest `width` bits, lowest first, uint8 [..., width]."""
    return (numbers[..., None] >> torch.arange(width, device=numbers.device) & 1).to(torch.uint8)


def number_of(bits: Tensor) -> Tensor:
    """The numbers of bits [..., width], lowest first, int64."""
    return (bits.long() << torch.arange(bits.shape[-1], device=bits.device)).sum(-1)
