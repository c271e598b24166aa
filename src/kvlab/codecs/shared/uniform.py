"""Asymmetric uniform grids for groups of neighbours on the last axis: what the integer codecs share."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.base import Arrays, stored
from kvlab.codecs.shared import fp16
from kvlab.codecs.stream import packing


def write(rows: Tensor, group: int, bits: int, layer: int) -> Arrays:
    """Round each value to the nearest of the 2**bits levels of its group.

    A group's lowest level is its minimum rounded down to float16, and the step is rounded up, so that
    the levels reach over the whole group: no value is off by more than half a step, and a group of one
    value that float16 has is stored exactly.

    Parameters
    ----------
    rows : Tensor
        float32 [a, b, n]; groups run along n, and the last one may be shorter.
    group : int
        Values of a group.
    bits : int
        1..8.
    layer : int
        For the message of `NonFinite`, when a grid does not fit float16.

    Returns
    -------
    codes : Tensor
        uint8 [ceil(a b n bits / 8)].
    grid : Tensor
        Lowest level and step, float16 [a, b, groups, 2].
    """
    top, cells = 2**bits - 1, grouped(rows, group)
    low, high = cells.amin(-1), cells.amax(-1)
    zero = fp16.below(low, "group minimum", layer)
    step = fp16.above((high - zero.float()) / top, "group step", layer)
    divisor = torch.where(step > 0, step, 1).float()
    levels = ((cells - zero.float()[..., None]) / divisor[..., None]).round_().clamp_(0, top)
    codes = levels.to(torch.uint8).flatten(-2)[..., : rows.shape[-1]]
    return packing.pack(codes.flatten(), bits), torch.stack((zero, step), dim=-1)


def read(arrays: Arrays, shape: tuple[int, int, int], group: int, bits: int) -> Tensor:
    """What `write` made of rows of `shape`, float32; `StreamError` when the arrays cannot be that."""
    a, b, n = shape
    size = packing.packed_size(a * b * n, bits)
    groups = -(-n // min(group, n))
    codes, grid = stored(arrays, (torch.uint8, (size,)), (torch.float16, (a, b, groups, 2)))
    zero, step = fp16.read(grid).unbind(-1)
    levels = grouped(packing.unpack(codes, bits, a * b * n).reshape(shape).float(), group)
    return (levels * step[..., None] + zero[..., None]).flatten(-2)[..., :n]


def grouped(values: Tensor, group: int) -> Tensor:
    """[..., n] as [..., groups, group], the last group filled up with its last value."""
    n = values.shape[-1]
    group = min(group, n)
    missing = -n % group
    if missing:
        values = torch.cat((values, values[..., -1:].expand(*values.shape[:-1], missing)), dim=-1)
    return values.unflatten(-1, (-1, group))
