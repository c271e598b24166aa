"""`klt`'s rows read for attention: components by a compiled loop, and the way from them to tokens as matrix products.

A token is mean + components x inverse. Attention weighs tokens and adds them up, so for V the product may come after
the sum: it is then one for each query, and not one for each token that was attended to. K is turned by its position
between the product and the scores, so it has to be made whole.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kvlab.base.errors import StreamError
from kvlab.cache.pages import hot
from kvlab.codec.klt.bits import VALUE_BITS, low_bits, value_of
from kvlab.codec.klt.escapes import Tails
from kvlab.codec.klt.grouping import parted
from kvlab.codec.klt.planes import Planes
from kvlab.codec.klt.synthesis import Synthesis

SHARE = 256  # tokens that are worth a thread of their own


class Components:
    """What attention reads of one layer's K or V.

    Parameters
    ----------
    plan : Synthesis
        The layer's decoder.
    """

    def __init__(self, plan: Synthesis):
        self.heads, self.groups, self.width = plan.heads, plan.groups, plan.width
        self.digits, self.escapes = digits_of(plan.planes, plan.table), escapes_of(plan)
        self.inverse = torch.cat((plan.inverse, plan.shift), dim=1)  # the last row is added where the last column is 1
        self.mean = plan.mean

    def read(self, rows: Tensor, slots: Tensor, first: int) -> Tensor:
        """Components of slots int64 [n], and 1 after those about the second mean, float32 [groups, n, width + 1].

        Parameters
        ----------
        rows : Tensor
            All pages as rows uint8 [slots, bytes].
        slots : Tensor
            Which of them, int64 [n].
        first : int
            Where K's or V's bytes begin in a row.

        Raises
        ------
        StreamError
            A row is none that could have been written.
        """
        out = np.empty((self.groups, len(slots), self.width + 1), np.float32)
        pages, which = rows.numpy(), slots.numpy()
        threads = min(torch.get_num_threads(), max(1, len(slots) // SHARE))

        def part(number: int) -> int:
            own = slice(len(which) * number // threads, len(which) * (number + 1) // threads)
            return hot.components(pages, which[own], first, self.digits, self.escapes, out[:, own])

        faults = [part(0)] if threads == 1 else list(pool(threads).map(part, range(threads)))
        for fault in faults:
            if fault:
                raise StreamError(hot.FAULTS[fault])
        return torch.from_numpy(out)

    def tokens(self, components: Tensor) -> Tensor:
        """The tokens float32 [heads, n, head_dim] of components."""
        return parted(torch.baddbmm(self.mean, components, self.inverse), self.heads)

    def finished(self, mixed: Tensor) -> Tensor:
        """Sums of components by weights that add up to 1 [heads, ..., width + 1], as sums of tokens [heads, ..., d]."""
        per = self.heads // self.groups
        inverse = self.inverse.unflatten(2, (per, -1)).transpose(1, 2).flatten(0, 1)
        mean = parted(self.mean, self.heads)
        return torch.baddbmm(mean, mixed.flatten(1, -2), inverse).unflatten(1, mixed.shape[1:-1])


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Threads for the compiled loop, which needs no interpreter."""
    return ThreadPoolExecutor(threads, thread_name_prefix="kvlab-pages")


def digits_of(planes: Planes, table: Tensor) -> hot.Digits:
    """Where a token's digits lie: each plane cut into runs of which a byte holds one digit each, as `Planes` packs."""
    symbol, byte, down, mask, up, start = [], [], [], [], [], 0
    for plane in planes.planes:
        own, size = torch.arange(len(plane.rows)), plane.bytes(1)
        symbol.append(plane.rows)
        byte.append(start + own % size)
        down.append(own // size * plane.size)
        mask.append(torch.full_like(own, (1 << plane.size) - 1))
        up.append(plane.shift[:, 0])
        start += size
    places = [torch.cat(part).long().numpy() for part in (symbol, byte)]
    small = [torch.cat([part.long() for part in parts]).to(torch.uint8).numpy() for parts in (down, mask, up)]
    return hot.Digits(*places, *small, table.contiguous().numpy())


def escapes_of(plan: Synthesis) -> hot.Escapes:
    """Where the escapes of a layer lie; of none, arrays without content and of the same kinds."""
    tails: Tails | None = plan.tails if plan.escaping else None
    every = low_bits(torch.arange(1 << VALUE_BITS), VALUE_BITS)
    long, byte, real = (torch.zeros(0, dtype=kind) for kind in (torch.int64, torch.uint8, torch.float32))
    if tails is None:
        found = [long.view(0, 0), byte.view(0, 0), byte.view(0, 0, 0), long.view(0, 0, 0), real, real, real]
    else:
        found = [tails.component, tails.place, tails.lost, tails.start, tails.heap.flatten(), tails.scales]
        found.append(value_of(every))
    counts = (tails.index_bits, tails.room) if tails else (0, 0)
    arrays = [part.contiguous().numpy() for part in (*found, *plain_of(tails.plain if tails else (), plan.width))]
    return hot.Escapes(tails is not None, *arrays[: len(found)], *counts, *arrays[len(found) :])


def plain_of(groups: tuple, width: int) -> list[Tensor]:
    """Vectors without tables, all groups beside each other: the last six of `hot.Escapes`."""

    def beside(parts: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        most = [max((part.shape[axis] for part in parts), default=0) for axis in range(len(shape))]
        out = torch.zeros(len(parts), *most, dtype=dtype)
        for row, part in zip(out, parts, strict=True):
            row[tuple(slice(size) for size in part.shape)] = part
        return out

    tables = [beside(list(own.tables), (0,), torch.float32) for own in groups]
    return [
        beside([own.component for own in groups], (0,), torch.int64),
        beside([own.place for own in groups], (0,), torch.uint8),
        torch.tensor([len(range(*own.parts[0][0].indices(width))) for own in groups], dtype=torch.int64),
        beside([torch.tensor([size for _, size in own.parts]) for own in groups], (0,), torch.int64),
        beside(tables, (0, 0), torch.float32),
        beside([own.back for own in groups], (0, 0), torch.float32),
    ]
