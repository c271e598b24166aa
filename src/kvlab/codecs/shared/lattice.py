"""Lattice codecs: rotated vectors cut into small words, each the nearest of the lattice points in a box.

A codebook is the even-sum points of a box (the lattice D_n), or of two boxes half a step apart (E8), and
is numbered without gaps, so that a word's number takes no more bits than its points need, and every
number that an encoder writes decodes to the point that it chose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import Arrays, Stats, stored
from kvlab.codecs.shared import fp16, hadamard_pad
from kvlab.codecs.shared.token_blocks import TokenBlockCodec
from kvlab.core.errors import StreamError

WORD = 8  # coordinates whose numbers are written together, in a whole number of bytes
MAX_BITS = 62  # of one number, so that twice the number fits int64


@dataclass(frozen=True)
class Box:
    """Points k - (levels - 1) / 2 with 0 <= k < levels in every coordinate and an even sum of k.

    Up to a shift these are points of D_n (Conway and Sloane, Sphere Packings, Lattices and Groups, ch. 4).
    """

    levels: tuple[int, ...]

    @cached_property
    def count(self) -> int:
        """How many points: half of the box, and of an odd number of points the larger half."""
        return (math.prod(self.levels) + 1) // 2

    @cached_property
    def order(self) -> list[int]:
        """Coordinates from the fastest digit of a point's number to the slowest; even levels first."""
        return sorted(range(len(self.levels)), key=lambda i: self.levels[i] % 2)

    def nearest(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """k of the nearest point and its squared distance: [n, m] -> float [n, m], [m].

        Rounds each coordinate and, when the sum is odd, moves the one coordinate for which that costs
        least to its next best level. That is the rule of Conway and Sloane (1982) for D_n; what a move
        costs at the walls of the box is counted as it is, so that the answer is exact outside of it too.
        """
        levels = torch.tensor(self.levels, dtype=y.dtype, device=y.device)[:, None]
        u = y + (levels - 1) / 2
        k = torch.minimum(u.round().clamp_(min=0), levels - 1)
        offset = u - k
        step = torch.ones_like(offset).copysign_(offset)
        beyond = (k + step).sub_((levels - 1) / 2).abs_() > levels / 2
        step = torch.where(beyond, -step, step)
        cost = (step * offset).mul_(-2).masked_fill_(levels == 1, math.inf)
        least, odd = cost.amin(0), k.sum(0).remainder_(2) == 1
        for i in range(len(self.levels)):  # the first coordinate among equals, which argmin finds ten times slower
            chosen = odd & (cost[i] == least)
            k[i] += step[i] * chosen
            odd &= ~chosen
        return k, (u - k).square_().sum(0)

    def number(self, k: Tensor) -> Tensor:
        """The number of each point, int64 [m], from its k [n, m].

        Mixed radix, halved: with all levels odd the even sum makes the number even. Otherwise the fastest
        digit has an even number of levels, and its lowest bit, which is lost, follows from the others.
        """
        value = torch.zeros(k.shape[1], dtype=torch.int64, device=k.device)
        for i in reversed(self.order):
            value.mul_(self.levels[i]).add_(k[i].long())
        return value >> 1

    def points(self, number: Tensor) -> Tensor:
        """The points [n, m] with these numbers, float32; the inverse of `number`."""
        value = number * 2
        k = torch.empty(len(self.levels), *number.shape, dtype=torch.int64, device=number.device)
        for i in self.order:
            above = torch.div(value, self.levels[i], rounding_mode="trunc")
            k[i] = value - above * self.levels[i]
            value = above
        k[self.order[0]] += k.sum(0) & 1
        half = torch.tensor(self.levels, device=number.device)[:, None] - 1
        return k.float() - half.float() / 2


@dataclass(frozen=True)
class Codebook:
    """The points of all boxes, those of the first box first."""

    boxes: tuple[Box, ...]

    @cached_property
    def count(self) -> int:
        """How many points."""
        return sum(box.count for box in self.boxes)

    def nearest(self, y: Tensor) -> Tensor:
        """Number of the point nearest to each column of `y`: [n, m] -> int64 [m]."""
        found, least, offset = None, None, 0
        for box in self.boxes:
            k, distance = box.nearest(y)
            number = box.number(k) + offset
            nearer = None if found is None else distance < least
            found = number if found is None else torch.where(nearer, number, found)
            least = distance if least is None else torch.where(nearer, distance, least)
            offset += box.count
        return found

    def points(self, numbers: Tensor) -> Tensor:
        """The points [n, m] with these numbers; `StreamError` when there is no point with one of them."""
        if numbers.numel() and not 0 <= numbers.min() <= numbers.max() < self.count:
            raise StreamError(
                f"a lattice point has a number beyond the {self.count} points of its codebook",
                code="stream.out-of-range",
            )
        points, offset = self.boxes[0].points(numbers.clamp(max=self.boxes[0].count - 1)), self.boxes[0].count
        for box in self.boxes[1:]:
            member = numbers >= offset
            points[:, member] = box.points(numbers[member] - offset)
            offset += box.count
        return points


@lru_cache(maxsize=32)
def codebook(dim: int, boxes: int, bits: int) -> Codebook:
    """The largest codebook that `bits` per coordinate can number.

    All sides of a box have L levels but for the first few, which have L + 1; each further box has one
    level more than the one before. A box whose sides differ lies half a step off in the longer ones: a
    shifted lattice, and as good a quantiser.

    Parameters
    ----------
    dim : int
        Coordinates of a word.
    boxes : int
        1 for D_n, 2 for E8 = D8 and D8 + 1/2.
    bits : int
        1..8; a word's number has at most 62 bits, which binds for 8 coordinates of 8 bits only.
    """
    allowed = 2 ** min(dim * bits, MAX_BITS)
    best = None
    for total in range(dim, dim * 2 ** (bits + 2)):
        levels, longer = divmod(total, dim)
        sides = [[levels + box + 1] * longer + [levels + box] * (dim - longer) for box in range(boxes)]
        found = Codebook(tuple(Box(tuple(side)) for side in sides))
        if found.count > allowed:
            break
        best = found
    return best


class LatticeCodec(TokenBlockCodec):
    """Stores each vector's scale as float16 and `bits` per rotated coordinate.

    The scale is the vector's norm times the lattice step that is best for Gaussian coordinates, or less
    where the largest coordinate stays inside the box with less. (The published D4 and E8 codecs store norm
    and largest coordinate, always scale by the latter, and leave the lattice where they clamp.)
    """

    per_token: ClassVar[bool] = True
    dim: ClassVar[int]
    boxes: ClassVar[int]
    steps: ClassVar[Sequence[float]]

    @property
    def book(self) -> Codebook:
        """The codebook of the recipe's rate."""
        return codebook(self.dim, self.boxes, self.recipe.bits)

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Bytes of the points' numbers, and scales, of one block."""
        y = hadamard_pad.forward(rows, self.recipe.seed, hadamard_pad.width(rows.shape[-1], WORD))
        reach = (min(self.book.boxes[-1].levels) - 1) / 2
        step = torch.minimum(rows.norm(dim=-1) * self.steps[self.recipe.bits - 1], y.abs().amax(-1) / reach)
        scale = fp16.nearest(step, "lattice step", layer)
        divisor = torch.where(scale > 0, scale, 1).float()[..., None]
        words = (y / divisor).reshape(-1, self.dim).mT.contiguous()
        data = to_bytes(self.book.nearest(words), self.dim, self.recipe.bits)
        return (data, scale), Stats(n_coefficients=y.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """The points that the numbers name, scaled and turned back."""
        heads, tokens, head_dim = shape
        wide = hadamard_pad.width(head_dim, WORD)
        size = heads * tokens * wide // WORD * self.recipe.bits
        data, scale = stored(arrays, (torch.uint8, (size,)), (torch.float16, (heads, tokens)))
        points = self.book.points(from_bytes(data, self.dim, self.recipe.bits))
        y = points.mT.reshape(heads, tokens, wide) * fp16.read(scale)[..., None]
        return hadamard_pad.inverse(y, self.recipe.seed, head_dim)


def to_bytes(numbers: Tensor, dim: int, bits: int) -> Tensor:
    """Numbers of words of `dim` coordinates as `bits` bytes for every eight coordinates, lowest first."""
    parts = numbers.unflatten(0, (-1, WORD // dim))
    joined = parts[:, 0]
    for i in range(1, parts.shape[1]):
        joined = joined | parts[:, i] << (i * dim * bits)
    places = torch.arange(0, 8 * bits, 8, device=numbers.device)
    return (joined[:, None] >> places).to(torch.uint8).flatten()


def from_bytes(data: Tensor, dim: int, bits: int) -> Tensor:
    """The numbers that `to_bytes` wrote, int64; bytes of other origin may name any number."""
    places = torch.arange(0, 8 * bits, 8, device=data.device)
    joined = (data.long().unflatten(0, (-1, bits)) << places).sum(-1)
    if dim == WORD:
        return joined
    parts = torch.arange(0, WORD * bits, dim * bits, device=data.device)
    return ((joined[:, None] >> parts) & ((1 << (dim * bits)) - 1)).flatten()
