"""What the bits of an escape say: numbers of some bits each, read and written for many vectors in a few steps.

They begin with a count of pairs. Where that is 0, the number of a scale follows, and the size of a vector without
tables; else as many pairs of a component and a value. Values and sizes are as `bits` stores them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.codecs.klt.bits import VALUE_BITS, root_of, value_of_root

COUNT_BITS, SCALE_BITS = 3, 5
PLAIN_BITS = COUNT_BITS + SCALE_BITS + VALUE_BITS


class Said(NamedTuple):
    """What escapes say.

    Parameters
    ----------
    count, number : Tensor
        Pairs; scale where there are none; int64 [v].
    size : Tensor
        Of vectors without tables, float32 [v].
    places, values : Tensor
        Components and values of pairs, int64 and float32 [v, room]; what is after `count` means nothing.
    """

    count: Tensor
    number: Tensor
    size: Tensor
    places: Tensor
    values: Tensor


@cache
def fields_of(bits: int, index_bits: int, room: int, device: torch.device) -> Fields:
    """`Fields` of these parameters: the same object each time, since those of all layers are mostly equal."""
    return Fields(bits, index_bits, room, device)


class Fields:
    """Where the numbers lie in the bits of an escape.

    Parameters
    ----------
    bits : int
        How many an escape may take; of a number that begins after them nothing is read.
    index_bits : int
        Those that name a component.
    room : int
        Pairs that a vector can hold.
    device : torch.device
        Where the vectors will be.
    """

    def __init__(self, bits: int, index_bits: int, room: int, device: torch.device):
        self.room, each = room, index_bits + VALUE_BITS
        firsts = [COUNT_BITS + pair * each for pair in range(room)]
        head = [(0, COUNT_BITS), (COUNT_BITS, SCALE_BITS), (COUNT_BITS + SCALE_BITS, VALUE_BITS)]
        pairs = [(first, index_bits) for first in firsts] + [(first + index_bits, VALUE_BITS) for first in firsts]
        spans = [torch.arange(first, min(first + wide, bits)) for first, wide in head + pairs]
        worth = torch.zeros(bits, len(spans), dtype=torch.float32)
        column, up = torch.zeros(2, 2, bits, dtype=torch.int64)
        for number, at in enumerate(spans):
            worth[at, number] = 2.0 ** (at - at[:1]).float()
            for paired in (0, 1) if number == 0 else (int(number >= len(head)),):
                column[paired, at], up[paired, at] = number, at - at[:1]
        self.worth, self.column, self.up = worth.to(device), column.to(device), up.to(device)

    def read(self, bits: Tensor) -> Said:
        """What bits uint8 [v, bits] say; values are not finite where no encoder wrote them.

        A product with powers of two, of numbers below 2**16: exact in float32.
        """
        numbers = (bits.float() @ self.worth).long()
        first = 3 + self.room
        roots = value_of_root(numbers.to(torch.int16))
        return Said(numbers[:, 0], numbers[:, 1], roots[:, 2], numbers[:, 3:first], roots[:, first:])

    def write(self, said: Said) -> Tensor:
        """Bits int64 [v, bits]; what is after those that an escape takes means nothing."""
        count, number, size, places, values = said
        roots = root_of(torch.cat((size[:, None], values), dim=1)).long()
        numbers = torch.cat((count[:, None], number[:, None], roots[:, :1], places, roots[:, 1:]), dim=1)
        paired = (count > 0).long()
        return numbers.gather(1, self.column[paired]) >> self.up[paired] & 1
