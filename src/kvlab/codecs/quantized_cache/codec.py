"""The grids of optimum-quanto and HQQ as transformers' `QuantizedCache` calls them, held against both.

quanto: the range of a group, in the model's dtype throughout. HQQ (Badri and Shaji 2023, "Half-Quadratic Quantization
of Large Machine Learning Models"): the same range, then its zero point is moved in 20 rounds at most, as long as the
mean error of the whole falls, by half-quadratic splitting of an l_0.7 norm; in float32, kept in the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.base import Arrays, Stats, StreamCalibration, all_finite, finite, stored
from kvlab.codecs.quantized_cache import QuantizedCacheStream
from kvlab.codecs.shared.token_blocks import TokenBlockCodec
from kvlab.codecs.stream import packing
from kvlab.core.errors import NonFinite

ROUNDS, NORM, SHARPNESS = 20, 0.7, 10.0  # of HQQ's search
FLAT, STEEPEST = 1e-4, 2e4  # a range below which HQQ takes 1 for its scale; its largest scale


class QuantizedCacheCodec(TokenBlockCodec):
    """An affine grid for every group.

    What fills no group is filled up with its last value, and counts; transformers refuses it.
    """

    def __init__(self, recipe: QuantizedCacheStream, calibration: StreamCalibration | None = None):
        super().__init__(recipe, calibration)
        self.per_token = False  # where a head is shorter than a group, it holds several tokens

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes, packed, and two numbers of each group in the model's dtype [groups, 2]."""
        values = self._grouped(rows.flatten()).to(getattr(torch, self.recipe.dtype))
        codes, grid = (_quanto if self.recipe.backend == "quanto" else _hqq)(values, self.recipe.bits)
        if not all_finite(grid.float()):
            raise NonFinite(
                f"layer {layer}: a grid for values of {rows.abs().max().item():.4g} does not fit {self.recipe.dtype};"
                " leave the layer uncoded",
                code="non-finite.too-large",
            )
        return (packing.pack(codes.flatten(), self.recipe.bits), grid), Stats(n_coefficients=codes.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """The levels that the codes name, in the order of the rows."""
        count, bits = shape[0] * shape[1] * shape[2], self.recipe.bits
        groups = -(-count // self.recipe.group)
        size = packing.packed_size(groups * self.recipe.group, bits)
        dtype = getattr(torch, self.recipe.dtype)
        codes, grid = stored(arrays, (torch.uint8, (size,)), (dtype, (groups, 2)))
        levels = packing.unpack(codes, bits, groups * self.recipe.group).view(groups, -1).to(dtype)
        step, offset = finite(grid, "a grid").split(1, dim=-1)
        quanto = self.recipe.backend == "quanto"
        values = step * levels - offset if quanto else (levels - offset) * step
        values = values if quanto else values.mT
        return finite(values.float().flatten()[:count].view(shape), "a block of a quantised cache")

    def _grouped(self, flat: Tensor) -> Tensor:
        """[groups, group]: neighbours, or for HQQ one value of every 64th part."""
        missing = -len(flat) % self.recipe.group
        flat = torch.cat((flat, flat[-1:].expand(missing)))
        if self.recipe.backend == "quanto":
            return flat.view(-1, self.recipe.group)
        return flat.view(self.recipe.group, -1).mT


def _quanto(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [groups, group], and step and shift [groups, 2]; every operation rounds to the dtype of `values`."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    levels = torch.round((values - low) / step)
    return _codes(levels, bits), torch.cat((step, -low), dim=-1)


def _hqq(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [groups, group], and step and zero point [groups, 2]."""
    dtype, values, top = values.dtype, values.float(), 2**bits - 1
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    scale = torch.where(high - low <= FLAT, 1.0, top / (high - low)).clamp(max=STEEPEST)
    zero, best = -low * scale, torch.inf
    for _ in range(ROUNDS):
        levels = torch.round(values * scale + zero).clamp(0, top)
        off = values - (levels - zero) / scale
        size = off.abs()
        shrunk = (size - size.pow(NORM - 1) / SHARPNESS).clamp(min=0) * off.sign()
        zero = torch.mean(levels - (values - shrunk) * scale, dim=-1, keepdim=True)
        error = size.mean()
        if not error < best:
            break
        best = error
    return _codes(torch.round(values * scale + zero), bits), torch.cat((1 / scale, zero), dim=-1).to(dtype)


def _codes(levels: Tensor, bits: int) -> Tensor:
    """As bytes; of a group without a range, 0."""
    return levels.nan_to_num(0).clamp(0, 2**bits - 1).to(torch.uint8)
