"""Matrices held in half precision: what a codec keeps in memory for as long as a cache lives."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class HalfMatrix:
    """A matrix in float16, its columns and then its rows divided by powers of two, so that no entry is above 1.

    An entry is off by at most 2**-11 of itself, or where it is tiny by 2**-25 of its row's and column's powers. There
    and back that moves a token by 68 dB or more below its size, where 4 bits move it by 18 to 42 (K and V of every
    third layer of SmolLM2, normal tokens of the calibration's covariance, in the codec's metric). The rounded matrix is
    what the codec is, on every device. Units of a channel make no difference, as long as they are powers of two.

    Parameters
    ----------
    values : Tensor
        float16 [..., rows, columns].
    row, column : Tensor
        Powers of two, float32 [..., rows, 1] and [..., 1, columns].
    """

    values: Tensor
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, matrix: Tensor, device: torch.device) -> HalfMatrix:
        """A matrix float32 [..., rows, columns]; of one that was rounded before, nothing changes."""
        column = power_above(matrix, -2)
        row = power_above(matrix / column, -1)
        return cls((matrix / column / row).half().to(device), row.to(device), column.to(device))

    def full(self, out: Tensor | None = None) -> Tensor:
        """The matrix float32; in `out` where that is given."""
        out = torch.empty_like(self.values, dtype=torch.float32) if out is None else out
        return out.copy_(self.values).mul_(self.row).mul_(self.column)  # torch multiplies mixed types slowly


def power_above(matrix: Tensor, axis: int) -> Tensor:
    """The least powers of two above what is largest along an axis, float32; that axis stays, of length 1."""
    largest = matrix.abs().amax(axis, keepdim=True)
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


_LENT = threading.local()


def lent(name: str, shape: tuple[int, ...], dtype: type = np.float32) -> NDArray:
    """An array that whoever asks next in this thread for that name is given again: new memory costs more than its use.

    A name is of one dtype.
    """
    size = math.prod(shape)
    held = _LENT.__dict__.get(name)
    if held is None or held.size < size:
        held = _LENT.__dict__[name] = np.empty(size, dtype)
    return held[:size].reshape(shape)


def scratch(name: str, *shape: int, device: torch.device | None = None) -> Tensor:
    """`lent` in float32, as a tensor; on another device than a CPU a new one."""
    if device is not None and device.type != "cpu":
        return torch.empty(shape, dtype=torch.float32, device=device)
    return torch.from_numpy(lent(name, shape))
