"""KVTC (arXiv 2511.01815): PCA over the heads of all layers, widths by dynamic programming, DEFLATE.

K of all layers are one vector of a token, before the rotary embedding, and so are V of all layers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvlab.codecs.base import Arrays, Codec, Encoded, Site, Stats, StreamCalibration, stored
from kvlab.codecs.kvtc import KvtcStream
from kvlab.codecs.shared import uniform
from kvlab.codecs.shared.ended_codec import EndedCodec
from kvlab.codecs.shared.exact_tokens import ExactTokens
from kvlab.codecs.shared.front import OwnFront
from kvlab.codecs.shared.products import product
from kvlab.codecs.shared.token_blocks import TokenBlockCodec
from kvlab.codecs.shared.transform import fixed_sign
from kvlab.codecs.stream import packing
from kvlab.codecs.stream.whole_file import STREAMS, Cache, Owner, dtype_of
from kvlab.core.errors import StreamError
from kvlab.core.recipe import Recipe

SIZES = (1, 16, 64, 256, 1024)  # components of a group, which share a scale and a shift
WIDTHS = (2, 4, 8)  # bits of a component; or none at all
RANGED = 1024  # tokens that the ranges of groups are taken from
SIDE = 32  # bits of a group's scale and shift, per token
UNSEEN = 4  # first tokens of a window that the fit leaves out, the paper's sinks
UNIT = 2  # bits that every price is a multiple of


class WidthGroup(NamedTuple):
    """Neighbouring components that are coded with one width."""

    first: int
    size: int
    width: int


@dataclass(frozen=True)
class Fit:
    """Principal components of K or of V of all layers: P = layers * kv_heads * head_dim.

    Parameters
    ----------
    mean : Tensor
        float32 [layers * kv_heads, head_dim].
    basis : Tensor
        Columns are components, most energetic first, float16 [P, P].
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
        """Heads of all layers, and head_dim."""
        return tuple(self.mean.shape)

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor, rows: Tensor, head_dim: int) -> Fit:
        """The fit of moments [P] and [P, P], and of a sample that ranges are taken from, float32 [tokens, P]."""
        energy, basis = torch.linalg.eigh(covariance)
        basis = fixed_sign(basis.flip(-1)[None], dim=-2)[0].to(torch.float16)
        few = (rows - mean.float()) @ basis.float()
        reach = torch.zeros(len(SIZES), len(mean), dtype=torch.float32)
        for number, size in enumerate(SIZES):
            if size <= len(mean):
                reach[number, : len(mean) - size + 1] = _ranges(few, size).square().mean(0)
        mean = mean.float().unflatten(0, (-1, head_dim)).contiguous()
        return cls(mean, basis.contiguous(), energy.flip(0).clamp(min=0).float().contiguous(), reach)


def _ranges(rows: Tensor, size: int) -> Tensor:
    """Largest less least of every `size` neighbours, [tokens, P - size + 1]; by doubling what is known of half."""
    high, low, held = rows, rows, 1
    while held < size:
        step = min(held, size - held)
        high = torch.maximum(high[:, :-step], high[:, step:])
        low = torch.minimum(low[:, :-step], low[:, step:])
        held += step
    return high - low


class KvtcCodec:
    """Codes K of all layers as one tensor, and V of all layers as another.

    Parameters
    ----------
    recipe : Recipe
        Of `KvtcStream`.
    fitted : mapping of str to Tensor
        ``{k|v}/{field of Fit}``.
    owner : Owner
    """

    def __init__(self, recipe: Recipe, fitted: Mapping[str, Tensor], owner: Owner):
        self.owner, kept = owner, ExactTokens.of(recipe.k)
        self._codecs: dict[str, Codec] = {}
        for stream in STREAMS:
            own = Fit(**{field.name: fitted[f"{stream}/{field.name}"] for field in fields(Fit)})
            inner = StackedCodec(getattr(recipe, stream), StreamCalibration(own={0: own}))
            self._codecs[stream] = EndedCodec(inner, kept) if kept else inner

    def encode(self, cache: Cache, ids: Sequence[int]) -> bytes:
        """See `WholeCodec`."""
        self.owner.refuse_other_shape(cache, ids)
        return self.owner.written(self._frames(cache), dtype_of(cache[0, "k"]), len(ids), stacked=True)

    def _frames(self, cache: Cache) -> Iterator[Encoded]:
        for stream, codec in self._codecs.items():
            stacked = torch.cat([cache[layer, stream].cpu() for layer in range(self.owner.layers)])
            yield codec.encode(stacked, Site(0, 0, stream))

    def decode(self, data: bytes, ids: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `WholeCodec`."""
        reader = self.owner.read(data, ids, stacked=True)
        k, v = (codec.decode(reader.frame(0, stream)) for stream, codec in self._codecs.items())
        yield from zip(range(self.owner.layers), k.split(self.owner.heads), v.split(self.owner.heads), strict=True)


class StackedCodec(TokenBlockCodec):
    """x -> (x - mean) basis, in groups of components that are rounded to even grids of their own per token.

    Which components make a group and how wide its codes are is what dynamic programming finds to lower the expected
    squared error most, within `bits` per value, scales and shifts counted. The codes of a block are then deflated,
    so that what is stored is less.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, recipe: KvtcStream, calibration: StreamCalibration | None = None):
        super().__init__(recipe, calibration)
        self._plans: dict[int, list[WidthGroup]] = {}

    def make_front(self) -> OwnFront:
        """See `TokenBlockCodec.make_front`."""
        return OwnFront(self.recipe.codec, self.calibration)

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Deflated codes, and the grids of one block."""
        own, x = self.front.of(layer), rows.transpose(0, 1).flatten(1)
        y = product(x - own.mean.flatten().to(x.device), own.basis.float().to(x.device))
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
        y = torch.zeros(tokens, heads * head_dim, dtype=torch.float32, device=grids.device)
        parts = codes[: sum(sizes)].split(sizes) if plan else ()
        for number, (group, code) in enumerate(zip(plan, parts, strict=True)):
            read = (code.to(grids.device), grids[None, :, number : number + 1].contiguous())
            values = uniform.read(read, (1, tokens, group.size), group.size, group.width)
            y[:, group.first : group.first + group.size] = values[0]
        x = product(y, own.basis.float().mT.contiguous().to(y.device)) + own.mean.flatten().to(y.device)
        return x.unflatten(1, (heads, head_dim)).transpose(0, 1)

    def plan(self, layer: int) -> list[WidthGroup]:
        """The groups of one layer that are coded."""
        if layer not in self._plans:
            own = self.front.of(layer)
            self._plans[layer] = allocate(own.energy, own.reach, int(self.recipe.bits * len(own.energy)))
        return self._plans[layer]


def allocate(energy: Tensor, reach: Tensor, budget: int) -> list[WidthGroup]:
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
    count, budget = len(energy), budget // UNIT
    choices = [WidthGroup(0, size, width) for size in SIZES for width in WIDTHS]  # `first` is where it is applied
    prices = [(size * width + SIDE) // UNIT for _, size, width in choices]
    factors = [size / (12 * (2**width - 1) ** 2) for _, size, width in choices]
    ranges = reach.double().numpy()
    ahead = {0: np.zeros(budget + 1)}  # least error of all components before one, by bits; of those still to come
    came = np.full((count + 1, budget + 1), -1, dtype=np.int8)
    ends = np.full(count + 1, np.inf)
    for first in range(count + 1):
        best = ahead.pop(first, None)
        if best is None:
            continue
        ends[first] = best[budget]
        for number, (_, size, _) in enumerate(choices):
            price = prices[number]
            if first + size > count or price > budget:
                continue
            renewed = best[: budget + 1 - price] + factors[number] * ranges[SIZES.index(size), first]
            held = ahead.setdefault(first + size, np.full(budget + 1, np.inf))[price:]
            better = renewed < held
            np.copyto(held, renewed, where=better)
            np.copyto(came[first + size, price:], number, where=better, casting="unsafe")
    left = np.append(np.cumsum(energy.double().numpy()[::-1])[::-1], 0.0)
    last, found = int(np.argmin(ends + left)), []
    while last:
        _, size, width = choices[came[last, budget]]
        last, budget = last - size, budget - (size * width + SIDE) // UNIT
        found.append(WidthGroup(last, size, width))
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
