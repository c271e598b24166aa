"""`klt`'s rows read for attention: components by a compiled loop, and the way from them to tokens as matrix products.

A token is mean + components x inverse. Attention weighs tokens and adds them up, so for V the product may come after
the sum: it is then one for each query, and not one for each token that was attended to. K is turned by its position
between the product and the scores, so it has to be made whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlab.codecs.klt.planes import Planes
from kvlab.codecs.klt.synthesis import Synthesis
from kvlab.codecs.shared.grouping import parted
from kvlab.core.errors import StreamError

OK, TOO_MANY, NO_PLAIN, IMPOSSIBLE = range(4)
FAULTS = {
    TOO_MANY: "a vector holds more escapes than there is room for",
    NO_PLAIN: "a vector says that it has no tables, and has no room for that",
    IMPOSSIBLE: "an escape names a component or holds a value that cannot be",
}

Loop = Callable[[Tensor, Tensor, int], Tensor]
"""All pages as rows uint8 [slots, bytes], which of them int64 [n], and where K's or V's bytes begin in a row, to
components, and 1 after those of vectors about the second mean, float32 [groups, n, width + 1]; `StreamError` where a
row is none that could have been written."""


class RowReader:
    """What attention reads of one layer's K or V.

    Parameters
    ----------
    plan : Synthesis
        The layer's decoder.
    read : Loop
        Makes components of its rows.
    """

    def __init__(self, plan: Synthesis, read: Loop):
        self.heads, self.groups, self.plan, self.read = plan.heads, plan.groups, plan, read

    def tokens(self, components: Tensor) -> Tensor:
        """The tokens float32 [heads, n, head_dim] of components."""
        return parted(torch.baddbmm(self.plan.mean, components, self.plan.inverse), self.heads)


PART = 1024  # tokens of which one matrix product makes keys: more of them cost less each, and leave the near cache


class Looked(NamedTuple):
    """Tokens that few queries look at, the same for all layers.

    Tokens are cut into runs of at most `PART` neighbours of one sequence, and runs gathered into parts of at most as
    many tokens. Where that is done depends on the sequences alone, not on threads.

    Parameters
    ----------
    slots : array
        Where the tokens of all sequences lie, int64 [tokens].
    until : array
        The position at which the keys of each query end, int64 [queries].
    runs : array
        Of each the first of its tokens, how many they are, the position of the first, the first and the last one of its
        queries, and how many queries all runs before have, int64 [runs, 6].
    parts : tuple of (int, int)
        The first and the last run of each part.
    queries : array
        The query of each of those that runs have, int64 [sum over runs].
    """

    slots: NDArray
    until: NDArray
    runs: NDArray
    parts: tuple[tuple[int, int], ...]
    queries: NDArray

    @classmethod
    def at(
        cls, slots: NDArray, counts: Sequence[int], positions: Sequence[int], starts: Sequence[int], until: NDArray
    ) -> Looked:
        """Of sequences: how many of `slots` are each one's, the first one's position, and where its queries begin."""
        runs, parts, offset, seen, size = [], [], 0, 0, 0
        for number, (count, position) in enumerate(zip(counts, positions, strict=True)):
            first, last = starts[number], starts[number + 1]
            for start in range(0, count, PART):
                tokens = min(PART, count - start)
                if not parts or size + tokens > PART:
                    parts, size = [*parts, (len(runs), len(runs))], 0
                runs.append((offset + start, tokens, position + start, first, last, seen))
                parts[-1], size, seen = (parts[-1][0], len(runs)), size + tokens, seen + last - first
            offset += count
        found = np.array(runs, np.int64).reshape(-1, 6)
        own = found[:, 4] - found[:, 3]
        queries = np.arange(own.sum()) + np.repeat(found[:, 3] - found[:, 5], own)
        return cls(slots, until, found, tuple(parts), queries)


def refuse(fault: int) -> None:
    """`StreamError` for what a loop says of a row, unless it is `OK`."""
    if fault != OK:
        raise StreamError(FAULTS[fault])


class PlaneDigits(NamedTuple):
    """Where the digits of one plane lie in a token's row, int64 on the CPU.

    Parameters
    ----------
    size : int
        Bits of a digit.
    symbol, byte : Tensor
        Which symbol each is of, and its byte in the row [digits].
    down, up : Tensor
        The digit is ``(byte >> down & (1 << size) - 1) << up`` of its symbol [digits].
    """

    size: int
    symbol: Tensor
    byte: Tensor
    down: Tensor
    up: Tensor


def digits_of(planes: Planes) -> list[PlaneDigits]:
    """Each plane cut into runs of which a byte holds one digit each, as `Planes` packs one token."""
    found, start = [], 0
    for plane in planes.planes:
        own, size = torch.arange(len(plane.rows)), plane.bytes(1)
        places = plane.rows.cpu(), start + own % size, own // size * plane.size, plane.shift[:, 0].cpu().long()
        found.append(PlaneDigits(plane.size, *places))
        start += size
    return found


def plain_of(groups: tuple, width: int) -> list[Tensor]:
    """Vectors without tables, all groups beside each other, padded with zeros.

    Parameters
    ----------
    groups : tuple of PlainGroup
        `Tails.plain`.
    width : int
        Components of a group.

    Returns
    -------
    list of Tensor
        Component and place of each of their bits, int16 and uint8 [groups, bits]; how many coefficients have a bit
        more, int64 [groups]; bits of those and of the others, int64 [groups, 2]; their tables, float32
        [groups, 2, most].
    """
    tables = [beside(list(own.tables), (0,), torch.float32) for own in groups]
    return [
        beside([own.component for own in groups], (0,), torch.int16),
        beside([own.place for own in groups], (0,), torch.uint8),
        torch.tensor([len(range(*own.parts[0][0].indices(width))) for own in groups], dtype=torch.int64),
        beside([torch.tensor([size for _, size in own.parts]) for own in groups], (0,), torch.int64),
        beside(tables, (0, 0), torch.float32),
    ]


def beside(parts: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Tensors of as many axes as `shape` has, one after the other, each padded with zeros."""
    most = [max((part.shape[axis] for part in parts), default=0) for axis in range(len(shape))]
    out = torch.zeros(len(parts), *most, dtype=dtype)
    for row, part in zip(out, parts, strict=True):
        row[tuple(slice(size) for size in part.shape)] = part
    return out
