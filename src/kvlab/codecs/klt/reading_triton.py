"""`klt`'s rows read by the Triton kernel: its tables as tensors where the pages are, and its launch.

Not run on a GPU so far (`rows_triton`).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvlab.codecs.klt.planes import Planes
from kvlab.codecs.klt.reading import beside, digits_of, plain_of, refuse
from kvlab.codecs.klt.rows_triton import components_kernel
from kvlab.codecs.klt.synthesis import Synthesis

PART = 16  # coefficients of a vector without tables that are made at a time


class TritonLoop:
    """Reads rows in the memory of a GPU, or of a CPU under Triton's interpreter (`reading.Loop`).

    Parameters
    ----------
    plan : Synthesis
        The layer's decoder, on the device of the pages.
    """

    def __init__(self, plan: Synthesis):
        self.groups, self.width = plan.groups, plan.width
        places, self.digits = bits_of(plan.planes)
        tensors, self.numbers = tables_of(plan, places)
        self.tensors = [part.to(plan.mean.device).contiguous() for part in tensors]
        self.digits = self.digits[:, :, : plan.rows].to(plan.mean.device).contiguous()
        self.escaping = plan.escaping

    def __call__(self, rows: Tensor, slots: Tensor, first: int) -> Tensor:
        """See `reading.Loop`; waits for the device, since what is wrong with a row has to be known."""
        out = rows.new_empty(self.groups, len(slots), self.width + 1, dtype=torch.float32)
        if not len(slots):
            return out
        faults = rows.new_zeros(self.groups, len(slots), dtype=torch.int32)
        table, *escapes = self.tensors
        components_kernel[len(slots), self.groups](
            *(rows, slots, out, faults, self.digits, table, *escapes),
            *(rows.shape[1], first, len(slots), self.width, table.shape[1]),
            **self.numbers,
            LANES=triton.next_power_of_2(self.width),
            PART=PART,
            DIGITS=self.digits.shape[1],
            ESCAPES=self.escaping,
        )
        refuse(int(faults.max()))
        return out


def bits_of(planes: Planes) -> tuple[Tensor, Tensor]:
    """Where the bits and the digits of a token's symbols lie in its row, whose bits are counted from the first byte.

    Returns
    -------
    places : Tensor
        By symbol and bit, int64 [rows, 8]; 0 where a symbol has no such bit.
    digits : Tensor
        First bit, mask and shift of the digit that a symbol has in each plane, int32 [3, planes, rows]; all 0 where
        it has none.
    """
    found = digits_of(planes)
    places, digits = torch.zeros(planes.rows, 8, dtype=torch.int64), torch.zeros(3, len(found), planes.rows).int()
    for number, own in enumerate(found):
        first = 8 * own.byte + own.down
        for bit in range(own.size):
            places[own.symbol, own.up + bit] = first + bit
        for part, what in zip(digits[:, number], (first, (1 << own.size) - 1, own.up), strict=True):
            part[own.symbol] = torch.as_tensor(what).int()
    return places, digits


def tables_of(plan: Synthesis, places: Tensor) -> tuple[list[Tensor], dict[str, int | bool]]:
    """What `components_kernel` takes after `digits`, and its numbers by name; without escapes, empty tensors."""
    table = plan.trees.table().flatten(0, 1)
    if not plan.escaping:
        numbers = dict.fromkeys(("TAIL", "ROOM", "INDEX_BITS", "PLAIN_BITS", "PLAIN_TABLE"), 0)
        return [table, *[torch.zeros(1, dtype=torch.int32)] * 11], numbers | {"PLAIN_THERE": False}
    tails, flags = plan.tails, places[plan.rows :, 0]
    row = torch.arange(plan.groups)[:, None] * plan.width

    def of_bits(component: Tensor, place: Tensor) -> Tensor:
        return places[row[: len(component)] + component.long(), place.long()].int()

    component, place, wide, held, even_table = plain_of(tails.plain, plan.width)
    back = beside([own.back for own in tails.plain], (0, 0), torch.float32)
    tensors = [table, flags.int(), of_bits(tails.component.cpu(), tails.place.cpu())]
    tensors += [tails.lost, tails.start.int(), tails.trees.values, tails.scales]
    tensors += [of_bits(component, place), wide.int(), held.int(), even_table, back]
    numbers = {"TAIL": tails.component.shape[1], "ROOM": tails.room, "INDEX_BITS": tails.index_bits}
    numbers |= {"PLAIN_BITS": component.shape[1], "PLAIN_TABLE": even_table.shape[-1], "PLAIN_THERE": bool(tails.plain)}
    return tensors, numbers
