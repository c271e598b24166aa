"""KVTC (arXiv 2511.01815) as far as one layer goes: PCA over its heads, widths by dynamic programming, DEFLATE.

The paper takes the principal components of all layers' K (and of all layers' V) together, before the rotary embedding.
A codec here sees one layer's K or V at a time, so that what layers share is not gained.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvlab.base.errors import StreamError
from kvlab.base.recipe import KvtcStream
from kvlab.codec.base import Arrays, Stats, StreamCalibration, stored
from kvlab.codec.ladder import uniform
from kvlab.codec.ladder.own import OwnFront
from kvlab.codec.ladder.token_blocks import TokenBlockCodec
from kvlab.codec.products import product
from kvlab.codec.stream import packing
from kvlab.codec.transform import fixed_sign

SIZES = (1, 16, 64, 256, 1024)  # components of a group, which share a scale and a shift
WIDTHS = (2, 4, 8)  # bits of a component; or none at all
RANGED = 1024  # tokens that the ranges of groups are taken from
SIDE = 32  # bits of a group's scale and shift, per token
UNSEEN = 4  # first tokens of a window that the fit leaves out, the paper's sinks


class Group(NamedTuple):
    """Neighbouring components that are coded with one width."""

    first: int
    size: int
    width: int


@dataclass(frozen=True)
class Fit:
    """Principal components of all heads of one layer's K or V.

    Parameters
    ----------
    mean : Tensor
        float32 [heads, head_dim].
    basis : Tensor
        Columns are components, most energetic first, float32 [P, P] with P = heads * head_dim.
    energy : Tensor
        Mean square of each, float32 [P].
    reach : Tensor
        Mean squared range (largest less least) of the `SIZES` groups that begin at each component, float32
        [SIZES, P]; 0 where there are fewer components.
    """

    mean: Tensor
    basis: Tensor
    energy: Tensor
    reach: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """KV heads and head_dim."""
        return tuple(self.mean.shape)

    @classmethod
    def of(cls, rows: Tensor) -> Fit:
        """The fit of a sample, float32 [heads, windows, tokens, head_dim]."""
        x = rows[:, :, min(UNSEEN, rows.shape[2] - 1) :].double().flatten(1, 2).transpose(0, 1).flatten(1)
        mean = x.mean(0)
        centred = x - mean
        basis = torch.linalg.eigh(centred.mT @ centred / len(x)).eigenvectors.flip(-1)
        basis = fixed_sign(basis[None], dim=-2)[0]
        y = centred @ basis
        few = y[:: max(1, len(y) // RANGED)].float()
        reach = torch.zeros(len(SIZES), y.shape[1], dtype=torch.float64)
        for number, size in enumerate(SIZES):
            if size <= y.shape[1]:
                groups = few.unfold(1, size, 1)
                reach[number, : groups.shape[1]] = (groups.amax(-1) - groups.amin(-1)).double().square().mean(0)
        parts = (mean.unflatten(0, (len(rows), -1)), basis, y.square().mean(0), reach)
        return cls(*(part.float().contiguous() for part in parts))


class KvtcCodec(TokenBlockCodec):
    """x -> (x - mean) basis, in groups of components that are rounded to even grids of their own per token.

    Which components make a group and how wide its codes are is what dynamic programming finds to lower the expected
    squared error most, within `bits` per value, scales and shifts counted. The codes of a block are then deflated,
    so that what is stored is less.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, recipe: KvtcStream, calibration: StreamCalibration | None = None):
        super().__init__(recipe, calibration)
        self._plans: dict[int, list[Group]] = {}

    def make_front(self) -> OwnFront:
        """See `TokenBlockCodec.make_front`."""
        return OwnFront(self.recipe.codec, self.calibration)

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Deflated codes, and the grids of one block."""
        own, x = self.front.of(layer), rows.transpose(0, 1).flatten(1)
        y = product(x - own.mean.flatten().to(x.device), own.basis.to(x.device))
        codes, grids = [], [x.new_zeros(len(x), 0, 2, dtype=torch.float16)]
        for group in self.plan(layer):
            part = y[None, :, group.first : group.first + group.size]
            code, grid = uniform.write(part, group.size, group.width, layer)
            codes.append(code.cpu().numpy().tobytes())
            grids.append(grid[0])
        data = torch.frombuffer(bytearray(zlib.compress(b"".join(codes), 9)), dtype=torch.uint8).to(x.device)
        return (data, torch.cat(grids, dim=1)), Stats(n_coefficients=x.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """The levels that the codes name, turned back."""
        heads, tokens, head_dim = shape
        own, plan = self.front.of(layer), self.plan(layer)
        data, grids = stored(arrays, (torch.uint8, (None,)), (torch.float16, (tokens, len(plan), 2)))
        sizes = [packing.packed_size(tokens * group.size, group.width) for group in plan]
        codes = torch.frombuffer(bytearray(_inflated(data, sum(sizes)) or b"\0"), dtype=torch.uint8)
        y = torch.zeros(tokens, heads * head_dim, device=grids.device)
        parts = codes[: sum(sizes)].split(sizes) if plan else ()
        for number, (group, code) in enumerate(zip(plan, parts, strict=True)):
            read = (code.to(grids.device), grids[None, :, number : number + 1].contiguous())
            values = uniform.read(read, (1, tokens, group.size), group.size, group.width)
            y[:, group.first : group.first + group.size] = values[0]
        x = product(y, own.basis.mT.contiguous().to(y.device)) + own.mean.flatten().to(y.device)
        return x.unflatten(1, (heads, head_dim)).transpose(0, 1)

    def plan(self, layer: int) -> list[Group]:
        """The groups of one layer that are coded."""
        if layer not in self._plans:
            own = self.front.of(layer)
            self._plans[layer] = allocate(own.energy, own.reach, int(self.recipe.bits * len(own.energy)))
        return self._plans[layer]


def allocate(energy: Tensor, reach: Tensor, budget: int) -> list[Group]:
    """The groups and widths of least expected squared error that take at most `budget` bits per token.

    Parameters
    ----------
    energy : Tensor
        Mean square of each component [P]: what leaving it out costs.
    reach : Tensor
        Mean squared range of the group of each of `SIZES` that begins at a component [SIZES, P]; an even grid of
        2**w levels over a range r has the error r^2 / (12 (2**w - 1)^2).
    budget : int
        Bits.

    Returns
    -------
    list of Group
        In order, without gaps from component 0 on; components after the last one are left out.
    """
    count = len(energy)
    left = energy.double().flip(0).cumsum(0).flip(0)
    best = torch.full((count + 1, budget + 1), torch.inf, dtype=torch.float64)
    best[0] = 0.0
    choices = [Group(0, size, width) for size in SIZES for width in WIDTHS]  # `first` is where it is applied
    came = torch.full((count + 1, budget + 1), -1, dtype=torch.int8)
    for first in range(count):
        for number, (_, size, width) in enumerate(choices):
            price = size * width + SIDE
            if first + size > count or price > budget:
                continue
            error = size * float(reach[SIZES.index(size), first]) / (12 * (2**width - 1) ** 2)
            renewed, held = best[first, : budget + 1 - price] + error, best[first + size, price:]
            better = renewed < held
            held[better], came[first + size, price:][better] = renewed[better], number
    total = best[:, budget] + torch.cat((left, left.new_zeros(1)))
    last, found = int(total.argmin()), []
    while last:
        _, size, width = choices[int(came[last, budget])]
        last, budget = last - size, budget - size * width - SIDE
        found.append(Group(last, size, width))
    return found[::-1]


def _inflated(data: Tensor, size: int) -> bytes:
    """Exactly `size` bytes; `StreamError` when the data hold others, or none."""
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(data.cpu().numpy().tobytes(), size + 1)
    except zlib.error as error:
        raise StreamError(f"the codes of a block cannot be inflated: {error}") from None
    if len(found) != size or not reader.eof or reader.unused_data:
        raise StreamError(f"the codes of a block inflate to other than the {size} bytes that the recipe needs")
    return found
