"""Vectors spread over a power of two of coordinates by the seeded Hadamard rotation, and back."""

from __future__ import annotations

from torch import Tensor

from kvlab.codecs.shared import rotation
from kvlab.codecs.shared.products import product
from kvlab.codecs.stream.packing import bits_for


def width(head_dim: int, least: int = 1) -> int:
    """The power of two that holds `head_dim` coordinates, and at least `least`."""
    return max(1 << bits_for(head_dim), least)


def forward(rows: Tensor, seed: int, wide: int) -> Tensor:
    """[heads, n, head_dim] into [heads, n, wide] coordinates whose mean square is the squared norm of the row."""
    return product(rows, rotation.forward(seed, wide, rows.device)[: rows.shape[-1]])


def inverse(spread: Tensor, seed: int, head_dim: int) -> Tensor:
    """[heads, n, wide] back into [heads, n, head_dim]."""
    return product(spread, rotation.inverse(seed, spread.shape[-1], spread.device))[..., :head_dim]
