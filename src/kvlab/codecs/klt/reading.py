"""`klt`'s rows read for attention: components by a compiled loop, and the way from them to tokens as matrix products.

A token is mean + components x inverse. Attention weighs tokens and adds them up, so for V the product may come after
the sum: it is then one for each query, and not one for each token that was attended to. K is turned by its position
between the product and the scores, so it has to be made whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.codecs.klt.grouping import parted
from kvlab.codecs.klt.planes import Planes
from kvlab.codecs.klt.synthesis import Synthesis
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


class Components:
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

    def finished(self, mixed: Tensor) -> Tensor:
        """Sums of components by weights that add up to 1 [heads, ..., width + 1], as sums of tokens [heads, ..., d]."""
        per = self.heads // self.groups
        inverse = self.plan.inverse.unflatten(2, (per, -1)).transpose(1, 2).flatten(0, 1)
        mean = parted(self.plan.mean, self.heads)
        return torch.baddbmm(mean, mixed.flatten(1, -2), inverse).unflatten(1, mixed.shape[1:-1])


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
