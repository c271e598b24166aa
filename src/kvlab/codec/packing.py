"""Integers of b bits packed into bytes, lowest bit first."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 8  # eight b-bit symbols fill exactly b bytes


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` symbols of `bits` bits."""
    return -(-count * bits // 8)


def pack(symbols: Tensor, bits: int) -> Tensor:
    """Pack the last axis; symbol i takes bits [i*b, i*b + b) of a little-endian bit stream.

    Parameters
    ----------
    symbols : Tensor
        Integers [..., N] below 2**bits.
    bits : int
        0..8; with 0 bits nothing is stored.

    Returns
    -------
    Tensor
        uint8 [..., ceil(N * bits / 8)].
    """
    count = symbols.shape[-1]
    if bits == 0:
        return torch.zeros(*symbols.shape[:-1], 0, dtype=torch.uint8, device=symbols.device)
    if bits == 8:
        return symbols.to(torch.uint8)
    padded = torch.nn.functional.pad(symbols.long(), (0, -count % GROUP))
    groups = padded.unflatten(-1, (-1, GROUP))
    words = (groups << ladder(GROUP, bits, symbols.device)).sum(-1, keepdim=True)
    data = (words >> ladder(bits, 8, symbols.device)) & 0xFF
    return data.to(torch.uint8).flatten(-2)[..., : packed_size(count, bits)].contiguous()


def unpack(data: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` symbols of what `pack` made, int64 [..., count]."""
    if bits == 0:
        return torch.zeros(*data.shape[:-1], count, dtype=torch.int64, device=data.device)
    if bits == 8:
        return data.long()
    padded = torch.nn.functional.pad(data.long(), (0, -data.shape[-1] % bits))
    groups = padded.unflatten(-1, (-1, bits))
    words = (groups << ladder(bits, 8, data.device)).sum(-1, keepdim=True)
    symbols = (words >> ladder(GROUP, bits, data.device)) & ((1 << bits) - 1)
    return symbols.flatten(-2)[..., :count]


def ladder(steps: int, rise: int, device: torch.device) -> Tensor:
    """0, rise, 2 rise, ...: bit positions inside a word."""
    return torch.arange(0, steps * rise, rise, device=device)
