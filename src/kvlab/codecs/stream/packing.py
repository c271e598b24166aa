"""Integers of b bits packed into bytes, lowest bit first.

Eight b-bit symbols fill exactly b bytes. They are moved eight at a time, in one 64-bit word that starts as
one symbol per byte: three shifts close the gaps between neighbours, then between pairs, then between fours.
Words are read from memory as they lie there, so the machine has to be little-endian.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 8
HALVES = (8, 16, 32)  # bits between neighbours that are brought together, or apart
TABLE_BITS = 12  # a look-up table of 2**12 runs of values stays in the first cache


def bits_for(count: int) -> int:
    """Bits that number `count` things, from 1 on: ceil(log2(count))."""
    return (count - 1).bit_length()


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
    symbols = symbols.to(torch.uint8)
    if bits == 8:
        return symbols.clone()
    if count % GROUP:
        symbols = pad(symbols, (0, -count % GROUP))
    words = symbols.contiguous().view(torch.int64)
    for lane in HALVES:
        held = bits * lane // 8
        words = words & every(held, 2 * lane) | words >> (lane - held) & every(held, 2 * lane, held)
    data = words.view(torch.uint8).unflatten(-1, (-1, GROUP))[..., :bits].flatten(-2)
    return data[..., : packed_size(count, bits)].contiguous()


def unpack(data: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` symbols of what `pack` made, int64 [..., count]."""
    if bits == 0:
        return torch.zeros(*data.shape[:-1], count, dtype=torch.int64, device=data.device)
    if bits == 8:
        return data[..., :count].long()
    return lanes(data, bits, 8).view(torch.uint8)[..., :count].long()


def lanes(data: Tensor, bits: int, lane: int) -> Tensor:
    """Packed bytes [..., m] as int64 words of eight symbols, each `lane` bits wide lane holding lane / 8 of them.

    Parameters
    ----------
    data : Tensor
        uint8.
    bits : int
        1..7.
    lane : {8, 16, 32}
        The symbols of one lane lie in its lowest bits, the first one lowest.
    """
    groups = -(-data.shape[-1] // bits)
    if data.shape[-1] % bits:
        data = pad(data, (0, groups * bits - data.shape[-1]))
    words = pad(data.unflatten(-1, (groups, bits)), (0, GROUP - bits)).view(torch.int64).squeeze(-1)
    for half in reversed(HALVES):
        if half < lane:
            break
        held = bits * half // 8
        words = words & every(held, 2 * half) | words << (half - held) & every(held, 2 * half, half)
    return words


def every(ones: int, lane: int, first: int = 0) -> int:
    """The 64-bit pattern with `ones` bits set from bit `first` of every lane on, as a signed integer."""
    pattern = sum(((1 << ones) - 1) << (start + first) for start in range(0, 64, lane))
    return pattern - (1 << 64) if pattern >> 63 else pattern


class LookUp:
    """Packed symbols straight as values of a table: several neighbouring symbols are looked up as one.

    Parameters
    ----------
    table : Tensor
        float32 [2**bits].
    bits : int
        1..8.
    """

    def __init__(self, table: Tensor, bits: int):
        self.bits = bits
        self.lane = 32 if 4 * bits <= TABLE_BITS else 16 if 2 * bits <= TABLE_BITS else 8
        symbols = self.lane // 8
        keys = torch.arange(1 << (symbols * bits), device=table.device)
        runs = torch.stack([(keys >> (bits * i)) & ((1 << bits) - 1) for i in range(symbols)], dim=-1)
        wide = {1: torch.float32, 2: torch.float64, 4: torch.complex128}[symbols]  # moved as they are, 4 to 16 bytes
        self.runs = table[runs].view(wide).flatten()

    def __call__(self, data: Tensor, count: int) -> Tensor:
        """``table[unpack(data, bits, count)]``, float32 [..., count]."""
        words = data if self.bits == 8 else lanes(data, self.bits, self.lane)
        keys = words.view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[self.lane]).int()
        values = self.runs.index_select(0, keys.flatten()).view(torch.float32)
        return values.view(*data.shape[:-1], -1)[..., :count]
