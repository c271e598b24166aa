"""Symbols of 0..8 bits, each component of its own width, as one flat run of bytes.

A symbol of b bits is cut into digits of 8, 4, 2 and 1 bits, the binary digits of b (5 = 4 + 1), low digit of
the symbol last. Digits of one size are a plane: all components that have one, all tokens. A plane of digits of
w bits is cut into 8 / w runs, and the i-th byte holds the i-th digit of each run, the first run lowest. Every
step is a shift of long runs of bytes, and a plane wastes less than one byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIZES = (8, 4, 2, 1)


@dataclass(frozen=True)
class Plane:
    """Digits of `size` bits: the rows that have one, how far up the symbol it sits [rows, 1] and the byte [runs, 1]."""

    size: int
    rows: Tensor
    shift: Tensor
    up: Tensor

    def bytes(self, tokens: int) -> int:
        """Bytes of the digits of `tokens` tokens."""
        return -(-len(self.rows) * tokens * self.size // 8)


class Planes:
    """Packs symbols of given widths.

    Parameters
    ----------
    widths : Tensor
        Bits of each row, 0..8, int64 [rows] on the CPU.
    device : torch.device, optional
        Where the symbols will be; the CPU when not given.
    """

    def __init__(self, widths: Tensor, device: torch.device | None = None):
        self.rows = len(widths)
        found = [(size, (widths & size).nonzero().flatten()) for size in SIZES]
        self.planes = [
            Plane(
                size,
                rows.to(device),
                (widths[rows] & (size - 1)).to(torch.uint8)[:, None].to(device),
                torch.arange(0, 8, size, dtype=torch.uint8, device=device)[:, None],
            )
            for size, rows in found
            if len(rows)
        ]

    def bytes(self, tokens: int) -> int:
        """Bytes of a block of `tokens` tokens."""
        return sum(plane.bytes(tokens) for plane in self.planes)

    def pack(self, symbols: Tensor) -> Tensor:
        """Blocks of symbols uint8 [B, rows, n], each below 2**width, as bytes uint8 [B, bytes(n)]."""
        parts = []
        for plane in self.planes:
            digits = symbols.index_select(1, plane.rows)
            if plane.size < 8:
                digits = (digits >> plane.shift) & ((1 << plane.size) - 1)
            digits, runs = digits.flatten(1), 8 // plane.size
            if digits.shape[1] % runs:
                digits = torch.nn.functional.pad(digits, (0, -digits.shape[1] % runs))
            digits = digits.unflatten(1, (runs, -1))
            parts.append(digits[:, 0] if runs == 1 else (digits << plane.up).sum(1, dtype=torch.uint8))
        return torch.cat(parts, dim=1)

    def unpack(self, data: Tensor, tokens: int) -> Tensor:
        """The symbols [B, rows, tokens] of what `pack` made [B, bytes(tokens)]."""
        symbols = torch.zeros(len(data), self.rows, tokens, dtype=torch.uint8, device=data.device)
        parts = data.split([plane.bytes(tokens) for plane in self.planes], dim=1)
        for plane, part in zip(self.planes, parts, strict=True):
            mask = (1 << plane.size) - 1
            digits = part if plane.size == 8 else ((part[:, None] >> plane.up) & mask).flatten(1)
            digits = digits[:, : len(plane.rows) * tokens].unflatten(1, (len(plane.rows), tokens))
            symbols.index_add_(1, plane.rows, digits << plane.shift)
        return symbols
