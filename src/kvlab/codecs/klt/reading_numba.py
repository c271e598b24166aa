"""`klt`'s rows read by the loop that numba compiles: its tables as arrays, and the threads that run it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlab.codecs.klt import rows_numba
from kvlab.codecs.klt.bits import VALUE_BITS, low_bits, value_of
from kvlab.codecs.klt.escapes import Tails
from kvlab.codecs.klt.plain import turn
from kvlab.codecs.klt.reading import digits_of, plain_of, refuse
from kvlab.codecs.klt.synthesis import Synthesis
from kvlab.codecs.shared.apart import apart

SHARE = 256  # tokens that are worth a thread of their own


class NumbaLoop:
    """Reads rows in the memory of a CPU (`reading.Loop`).

    Parameters
    ----------
    plan : Synthesis
        The layer's decoder.
    """

    def __init__(self, plan: Synthesis):
        self.groups, self.width = plan.groups, plan.width
        self.digits, self.escapes = arrays_of(plan), escapes_of(plan)

    def __call__(self, rows: Tensor, slots: Tensor, first: int) -> Tensor:
        """See `reading.Loop`."""
        out = np.empty((self.groups, len(slots), self.width + 1), np.float32)
        pages, which = rows.numpy(), slots.numpy()
        threads = min(torch.get_num_threads(), max(1, len(slots) // SHARE))

        def part(number: int) -> int:
            own = slice(len(which) * number // threads, len(which) * (number + 1) // threads)
            return rows_numba.components(pages, which[own], first, self.digits, self.escapes, out[:, own])

        for fault in [part(0)] if threads == 1 else pool(threads).map(part, range(threads)):
            refuse(fault)
        return torch.from_numpy(out)


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Threads for the compiled loop, which needs no interpreter."""
    return ThreadPoolExecutor(threads, thread_name_prefix="kvlab-pages")


def arrays_of(plan: Synthesis) -> rows_numba.Digits:
    """The digits of all planes one after the other, and what symbols stand for."""
    found = digits_of(plan.planes)
    symbol, byte, down, up = (torch.cat(parts) for parts in list(zip(*found, strict=True))[1:])
    mask = torch.cat([torch.full_like(own.up, (1 << own.size) - 1) for own in found])
    small = [part.to(torch.uint8).numpy() for part in (down, mask, up)]
    return rows_numba.Digits(symbol.int().numpy(), byte.int().numpy(), *small, *values_of(plan))


def values_of(plan: Synthesis) -> tuple[NDArray, NDArray]:
    """The values of a plan's components, and where each table begins; the plan's own memory."""
    return plan.trees.values.numpy(), plan.trees.first.flatten().numpy()


def escapes_of(plan: Synthesis) -> rows_numba.Escapes:
    """Where the escapes of a layer lie; of none, arrays without content and of the same kinds."""
    tails: Tails | None = plan.tails if plan.escaping else None
    short, byte, real = (torch.zeros(0, dtype=kind) for kind in (torch.int16, torch.uint8, torch.float32))
    if tails is None:
        found = [short.view(0, 0), byte.view(0, 0), byte.view(0, 0, 0), short.int().view(0, 0, 0), real, real, real]
    else:
        found = [tails.component, tails.place, tails.lost, tails.start, tails.trees.values, tails.scales, halves()]
    counts = (tails.index_bits, tails.room) if tails else (0, 0)
    plain = tails.plain if tails else ()
    units = torch.tensor([own.unit for own in plain], dtype=torch.float64)
    found += [*plain_of(plain, plan.width), turn(plan.width), units, plan.deviation]
    arrays = [part.contiguous().numpy() for part in found]
    return rows_numba.Escapes(tails is not None, *arrays[:7], *counts, *arrays[7:])


@cache
@apart
def halves() -> Tensor:
    """The number that each 16 bits stand for, float32 [65536]."""
    return value_of(low_bits(torch.arange(1 << VALUE_BITS), VALUE_BITS))
