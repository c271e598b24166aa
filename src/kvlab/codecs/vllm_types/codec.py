"""What vLLM 0.32 writes into its cache for each quantised type, held against its own kernels byte by byte.

The rules are those of its kernels in Triton (`reshape_and_cache_flash`, `int4_per_token_head`, `turboquant_store`), of
its kernel for CPUs where 8-bit floats are cut towards zero, and of its code in torch for ``nvfp4`` and UltraQuant.
SGLang's ``fp4_e2m1`` is by its source (layers/quantization/kvfp4_tensor.py, revision 0dae407b), not by running it.
Products and norms of a head are added up in an order that differs by device, which moves a code that lies on an edge;
everything else is the same number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from itertools import pairwise
from math import pi
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvlab.codecs.base import Arrays, Stats, StreamCalibration, all_finite, finite, stored
from kvlab.codecs.shared import fp16, hadamard_pad, rotation
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.token_blocks import TokenBlockCodec
from kvlab.codecs.shared.uniform import grouped
from kvlab.codecs.stream import packing
from kvlab.codecs.vllm_types import VllmStream
from kvlab.core.errors import NonFinite

LEAST = 1e-6  # of a scale per token and head; 1e-8 of an even grid's step
SIGNS_SEED = 0x9E3779B9  # of the signs that int4_per_token_head turns heads with
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1
FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class VllmCodec(TokenBlockCodec):
    """One of vLLM's types, as the class below of its name has it."""

    def __init__(self, recipe: VllmStream, calibration: StreamCalibration | None = None):
        super().__init__(recipe, calibration)
        self.per_token = recipe.scale == "one"
        self.way = _way(recipe)

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes and what they are scaled by."""
        rows = rows.to(getattr(torch, self.recipe.dtype)).float()
        return self.way.pack(_held(rows, layer), layer), Stats(n_coefficients=rows.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """The values that codes and scales stand for."""
        return finite(self.way.unpack(arrays, shape), "a block of vLLM's types")


class VllmType(ABC):
    """How rows [heads, n, head_dim] of float32, which the model's dtype has, become arrays and back."""

    @abstractmethod
    def pack(self, rows: Tensor, layer: int) -> Arrays:
        """The stored arrays."""

    @abstractmethod
    def unpack(self, arrays: Arrays, shape: tuple[int, int, int]) -> Tensor:
        """The rows that they say."""


class Floats(VllmType):
    """8-bit floats with one scale for all: 1, or the largest magnitude over the type's."""

    def __init__(self, kind: str, scaled: bool, cut: bool):
        self.dtype, self.scaled, self.cut = FLOATS[kind], scaled, cut

    def pack(self, rows: Tensor, layer: int) -> Arrays:
        """Codes [heads, n, head_dim], and the scale [1] unless it is 1."""
        if not self.scaled:
            return (_as_float8(rows, self.dtype, self.cut),)
        scale = rows.abs().amax()[None] / torch.finfo(self.dtype).max
        return _as_float8(rows / torch.where(scale > 0, scale, 1), self.dtype, self.cut), scale

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int]) -> Tensor:
        """Codes times scale."""
        scales = [(torch.float32, (1,))] if self.scaled else []
        codes, *scale = stored(arrays, (torch.uint8, shape), *scales)
        values = codes.view(self.dtype).float()
        return values * scale[0] if scale else values


class PerTokenHead(VllmType):
    """Codes of 8 bits with a scale per token and head, in float32."""

    def __init__(self, integer: bool):
        self.integer = integer

    def pack(self, rows: Tensor, layer: int) -> Arrays:
        """Codes [heads, n, head_dim] and scales [heads, n]."""
        scale = (rows.abs().amax(-1) / (127 if self.integer else 448)).clamp(min=LEAST)
        values = rows * (1 / scale)[..., None]
        if not self.integer:
            return _as_float8(values, FLOATS["e4m3"]), scale
        return _nearest(values).clamp(-128, 127).to(torch.int8), scale

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int]) -> Tensor:
        """Codes times scales."""
        dtype = torch.int8 if self.integer else torch.uint8
        codes, scale = stored(arrays, (dtype, shape), (torch.float32, shape[:2]))
        values = codes if self.integer else codes.view(FLOATS["e4m3"])
        return values.float() * scale[..., None]


class TurnedInt4(VllmType):
    """Signs and Walsh-Hadamard over the longest runs that fill a head, then 16 even levels per token and head.

    The zero point lies in the four lowest bits of the step, in float32.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def pack(self, rows: Tensor, layer: int) -> Arrays:
        """Codes, packed, and steps with their zero points [heads, n]."""
        turned = _held(_runs(rows * _signs(rows)).to(self.dtype).float(), layer)
        low, high = turned.amin(-1), turned.amax(-1)
        step = _held(((high - low) / 15).clamp(min=LEAST), layer)
        zero = _nearest(-low / step).clamp(0, 15)
        levels = turned * (1 / step)[..., None] + zero[..., None]
        codes = _nearest(levels).clamp(0, 15).to(torch.uint8)
        return packing.pack(codes, 4), (step.view(torch.int32) & -16 | zero.to(torch.int32)).view(torch.float32)

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int]) -> Tensor:
        """Levels about their zero points, turned back."""
        width = packing.packed_size(shape[2], 4)
        codes, packed = stored(arrays, (torch.uint8, (*shape[:2], width)), (torch.float32, shape[:2]))
        step, zero = (packed.view(torch.int32) & -16).view(torch.float32), packed.view(torch.int32) & 15
        turned = (packing.unpack(codes, 4, shape[2]) - zero[..., None]) * finite(step, "a step")[..., None]
        return _runs(turned / _run(shape[2])) * _signs(turned)


class Fp4(VllmType):
    """Floats of 4 bits (e2m1) with a byte of scale for every few neighbouring channels."""

    GROUP: ClassVar[int]

    @abstractmethod
    def scales(self, cells: Tensor) -> Tensor:
        """The byte of every group of cells [..., groups, group]."""

    @abstractmethod
    def worth(self, scale: Tensor) -> Tensor:
        """What such bytes are, float32."""

    @abstractmethod
    def codes(self, values: Tensor) -> Tensor:
        """The nearest codes of scaled values, uint8: of `LEVELS`, and 8 for a sign."""

    def pack(self, rows: Tensor, layer: int) -> Arrays:
        """Codes, packed, and scales [heads, n, groups]."""
        cells = grouped(rows, self.GROUP)
        scale = self.scales(cells)
        worth = self.worth(scale)
        codes = self.codes(cells * (1 / torch.where(worth > 0, worth, 1e8))[..., None])
        return packing.pack(codes.flatten(-2)[..., : rows.shape[-1]], 4), scale

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int]) -> Tensor:
        """Levels times scales."""
        head_dim = shape[2]
        groups = -(-head_dim // min(self.GROUP, head_dim))
        codes, scale = stored(
            arrays,
            (torch.uint8, (*shape[:2], packing.packed_size(head_dim, 4))),
            (torch.uint8, (*shape[:2], groups)),
        )
        table = torch.tensor([*LEVELS, *(-level for level in LEVELS)], dtype=torch.float32, device=codes.device)
        values = grouped(table[packing.unpack(codes, 4, head_dim)], self.GROUP)
        return (values * self.worth(scale)[..., None]).flatten(-2)[..., :head_dim]


class Nvfp4(Fp4):
    """NVFP4: scales in e4m3, a sixth of a group's largest magnitude; the scale of the tensor is 1."""

    GROUP = 16
    SIXTH = 1 / 6  # as float32 where it multiplies

    def scales(self, cells: Tensor) -> Tensor:
        """See `Fp4.scales`."""
        return _as_float8(cells.abs().amax(-1) * self.SIXTH, FLOATS["e4m3"])

    def worth(self, scale: Tensor) -> Tensor:
        """See `Fp4.worth`."""
        return scale.view(FLOATS["e4m3"]).float()

    def codes(self, values: Tensor) -> Tensor:
        """See `Fp4.codes`; a tie goes to the even code."""
        codes, size = torch.zeros_like(values, dtype=torch.uint8), values.abs()
        for number, (below, above) in enumerate(pairwise(LEVELS)):
            edge = (below + above) / 2
            codes += size >= edge if number % 2 else size > edge
        return codes | (values < 0).to(torch.uint8) << 3


class UltraQuant(Fp4):
    """UltraQuant: scales are powers of two, near .156 of a group's largest magnitude; K turned by Walsh-Hadamard."""

    GROUP = 32
    SHARE, BIAS = 0.156, 127

    def __init__(self, turned: bool):
        self.turned = turned

    def pack(self, rows: Tensor, layer: int) -> Arrays:
        """See `Fp4.pack`."""
        return super().pack(_held(self._turn(rows), layer), layer)

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int]) -> Tensor:
        """See `Fp4.unpack`."""
        return self._turn(super().unpack(arrays, shape))

    def _turn(self, rows: Tensor) -> Tensor:
        """Runs of coordinates turned; the matrix is its own inverse. vLLM takes heads of one run alone."""
        return _runs(rows) / _run(rows.shape[-1]) ** 0.5 if self.turned else rows

    def scales(self, cells: Tensor) -> Tensor:
        """See `Fp4.scales`."""
        raw = cells.abs().amax(-1) * self.SHARE
        power = (raw.log2() + 0.5).floor().clamp(1 - self.BIAS, self.BIAS)
        return torch.where(raw > 0, power + self.BIAS, 0).to(torch.uint8)

    def worth(self, scale: Tensor) -> Tensor:
        """See `Fp4.worth`."""
        return torch.where(scale > 0, (scale.float() - self.BIAS).exp2(), 0)

    def codes(self, values: Tensor) -> Tensor:
        """See `Fp4.codes`; a tie goes to the lesser value, and zero has no sign."""
        levels = torch.tensor([*(-level for level in LEVELS[:0:-1]), *LEVELS], dtype=torch.float32)
        levels = levels.to(values.device)
        place = torch.bucketize(values.contiguous(), (levels[1:] + levels[:-1]) / 2) - (len(LEVELS) - 1)
        return place.abs().to(torch.uint8) | (place < 0).to(torch.uint8) << 3


class SglangFp4(Fp4):
    """SGLang's KVFP4: the least power of two with which a group's largest magnitude is no more than 6."""

    GROUP = 16
    BIAS, TINY = 127, 1e-10

    def scales(self, cells: Tensor) -> Tensor:
        """See `Fp4.scales`."""
        power = (cells.abs().amax(-1) / LEVELS[-1]).clamp(min=self.TINY).log2().ceil()
        return (power + self.BIAS).to(torch.uint8)

    def worth(self, scale: Tensor) -> Tensor:
        """See `Fp4.worth`."""
        return (scale.float() - self.BIAS).exp2()

    def codes(self, values: Tensor) -> Tensor:
        """See `Fp4.codes`; a tie goes away from zero."""
        edges = torch.tensor([(below + above) / 2 for below, above in pairwise(LEVELS)], device=values.device)
        size = torch.bucketize(values.abs().contiguous(), edges, right=True)
        return size.to(torch.uint8) | (values < 0).to(torch.uint8) << 3


class LloydMax(VllmType):
    """TurboQuant's K: norm in float16, Walsh-Hadamard, a table for Gaussians; read back as a vector of that norm."""

    def __init__(self, bits: int):
        self.bits = bits

    def pack(self, rows: Tensor, layer: int) -> Arrays:
        """Codes, packed, and norms [heads, n]."""
        width = hadamard_pad.width(rows.shape[-1])
        norm = rows.norm(dim=-1)
        turned = rotation.hadamard(pad(rows / (norm + 1e-8)[..., None], (0, width - rows.shape[-1]))) / width**0.5
        table = gaussian_table(width, self.bits).to(rows.device)
        codes = torch.bucketize(turned.contiguous(), (table[1:] + table[:-1]) / 2, right=True)
        return packing.pack(codes, self.bits), fp16.nearest(norm, "norm", layer)

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int]) -> Tensor:
        """The table's vector, made one of unit norm, turned back and scaled."""
        width = hadamard_pad.width(shape[2])
        size = packing.packed_size(width, self.bits)
        codes, norm = stored(arrays, (torch.uint8, (*shape[:2], size)), (torch.float16, shape[:2]))
        values = gaussian_table(width, self.bits).to(codes.device)[packing.unpack(codes, self.bits, width)]
        values = values * (1 / (values.square().sum(-1, keepdim=True) + 1e-16).sqrt())
        return (rotation.hadamard(fp16.read(norm)[..., None] * values) / width**0.5)[..., : shape[2]]


class Even(VllmType):
    """TurboQuant's V: an even grid per token and head, from its least value; it and the step in float16."""

    def __init__(self, bits: int):
        self.bits = bits

    def pack(self, rows: Tensor, layer: int) -> Arrays:
        """Codes, packed, and step and least value [heads, n, 2]."""
        top, low, high = 2**self.bits - 1, rows.amin(-1), rows.amax(-1)
        step = ((high - low) / top).clamp(min=1e-8)
        levels = (rows - low[..., None]) / step[..., None] + 0.5
        codes = levels.clamp(0, top).to(torch.uint8)
        return packing.pack(codes, self.bits), fp16.nearest(torch.stack((step, low), -1), "grid of a token", layer)

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int]) -> Tensor:
        """Levels on their grids."""
        size = packing.packed_size(shape[2], self.bits)
        codes, grid = stored(arrays, (torch.uint8, (*shape[:2], size)), (torch.float16, (*shape[:2], 2)))
        step, low = fp16.read(grid).split(1, dim=-1)
        return packing.unpack(codes, self.bits, shape[2]) * step + low


def _way(recipe: VllmStream) -> VllmType:
    name = recipe.format
    if name in ("fp8_e4m3", "fp8_e5m2"):
        return Floats(name[-4:], recipe.scale == "tensor", recipe.rounding == "zero")
    kind, _, bits = name.rpartition("_")
    if kind in ("lloyd_max", "even"):
        return {"lloyd_max": LloydMax, "even": Even}[kind](int(bits))
    if name == "int4_per_token_head":
        return TurnedInt4(getattr(torch, recipe.dtype))
    if name == "fp4_e2m1":
        return SglangFp4()
    if kind == "ultraquant":
        return UltraQuant(turned=bits == "k")
    return Nvfp4() if name == "nvfp4" else PerTokenHead(name.startswith("int8"))


def _held(values: Tensor, layer: int) -> Tensor:
    """`values`; `NonFinite` when they left the dtype on the way."""
    if not all_finite(values):
        raise NonFinite(
            f"layer {layer}: values so large that vLLM's arithmetic leaves its dtype; leave the layer uncoded",
            code="non-finite.too-large",
        )
    return values


def _as_float8(values: Tensor, dtype: torch.dtype, cut: bool = False) -> Tensor:
    """The bytes: rounded to nearest, ties to even, or cut towards zero; what lies beyond the largest is the largest."""
    largest = torch.finfo(dtype).max
    values = values.clamp(-largest, largest) + 0.0 if cut else values.clamp(-largest, largest)  # no -0.0 on CPUs
    rounded = values.to(dtype)
    codes = rounded.view(torch.uint8)
    return codes - (rounded.float().abs() > values.abs()).to(torch.uint8) if cut else codes


def _nearest(values: Tensor) -> Tensor:
    """Half is added away from zero, and the rest is cut off."""
    return torch.where(values >= 0, values + 0.5, values - 0.5).trunc()


def _run(head_dim: int) -> int:
    """The largest power of two that divides it: its lowest bit."""
    return head_dim & -head_dim


def _runs(rows: Tensor) -> Tensor:
    """Walsh-Hadamard, not normalised, of every run."""
    return rotation.hadamard(rows.unflatten(-1, (-1, _run(rows.shape[-1])))).flatten(-2)


def _signs(rows: Tensor) -> Tensor:
    """The signs of a head's channels, the same in every run."""
    run = _run(rows.shape[-1])
    return _drawn_signs(run).to(rows.device).repeat(rows.shape[-1] // run)


@lru_cache(maxsize=32)
@apart
def _drawn_signs(run: int) -> Tensor:
    source = torch.Generator().manual_seed(SIGNS_SEED)
    return 2 * torch.bernoulli(torch.full((run,), 0.5, dtype=torch.float32), generator=source) - 1


@lru_cache(maxsize=32)
@apart
def gaussian_table(width: int, bits: int) -> Tensor:
    """The table that vLLM fits for N(0, 1 / width): Lloyd's iteration over trapezoids, float32 [2**bits].

    Cells begin as even parts of 3.5 standard deviations on either side and end at 10.5; the integrals have 200 steps.
    At most 200 rounds, or until no value moves by 1e-10. The exact table (`shared.quantizer`) differs in the fourth
    digit and beyond.
    """
    spread, levels, steps = width**-0.5, 2**bits, 200
    end = 3.5 * spread
    values = -end + 2 * end * (torch.arange(levels, dtype=torch.float64) + 0.5) / levels
    far = torch.tensor([3 * end], dtype=torch.float64)
    weight = torch.ones(steps + 1, dtype=torch.float64)
    weight[0] = weight[-1] = 0.5
    for _ in range(200):
        edges = torch.cat((-far, (values[1:] + values[:-1]) / 2, far))
        x = edges[:-1, None] + edges.diff()[:, None] / steps * torch.arange(steps + 1, dtype=torch.float64)
        density = (-x.square() / (2 * spread**2)).exp() / (2 * pi * spread**2) ** 0.5 * weight
        mass = density.sum(-1)
        renewed = torch.where(mass > 0, (x * density).sum(-1) / mass, values)
        if (renewed - values).abs().max() < 1e-10:
            break
        values = renewed
    return values.float()
