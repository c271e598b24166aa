"""Close the gaps that dropped tokens leave in K and V.

What decides which tokens stay is `selection`; this executes it. A token keeps its position: K is turned by it already,
or will be, and a cache whose tokens were numbered anew would be another text's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.core.errors import LayoutMismatch

STEP = 256  # tokens that are copied at once in place: a few hundred kB, which stay in a core's cache


@dataclass(frozen=True)
class Compacted:
    """What is left.

    Attributes
    ----------
    k, v : Tensor
        [.., kv_heads, kept, head_dim].
    positions : Tensor
        int64, where each kept token stood: [kept], or by row or KV head as `keep` was.
    freed : int
        Bytes of the tokens that are gone, of K and V.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    freed: int


def compact(k: Tensor, v: Tensor, keep: Tensor, in_place: bool = False) -> Compacted:
    """K and V of the tokens that stay.

    Parameters
    ----------
    k, v : Tensor
        [kv_heads, tokens, head_dim] or [batch, kv_heads, tokens, head_dim], of one shape, any dtype.
    keep : Tensor
        bool [tokens]; or rising int64 positions [kept], [batch, kept] (each row its own) or [batch, kv_heads, kept].
    in_place : bool
        Write into the beginning of `k` and `v` and return views of it: a rising list never writes where it has yet to
        read.

    Raises
    ------
    LayoutMismatch
        The shapes do not fit, or positions do not rise within the tokens that there are.
    """
    if k.shape != v.shape or k.dim() not in (3, 4):
        raise LayoutMismatch(f"K and V are of one shape with 3 or 4 axes, not {list(k.shape)} and {list(v.shape)}")
    positions = checked(keep.nonzero().flatten() if keep.dtype == torch.bool else keep, k, keep)
    kept = tuple(take(x, positions, in_place) for x in (k, v))
    freed = sum(x.nbytes - y.nbytes for x, y in zip((k, v), kept, strict=True))
    return Compacted(*kept, positions, freed)


def checked(positions: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    """The positions; `LayoutMismatch` where they cannot be those of tokens that stay."""
    tokens = k.shape[-2]
    if keep.dtype == torch.bool and keep.shape != (tokens,):
        raise LayoutMismatch(f"a mask of tokens is bool [{tokens}], not {list(keep.shape)}")
    if positions.dtype != torch.int64 or not 1 <= positions.dim() <= max(1, k.dim() - 1):
        raise LayoutMismatch(
            f"kept positions are int64 with 1 to {k.dim() - 1} axes, not {positions.dtype} of {list(positions.shape)}"
        )
    if positions.dim() > 1 and positions.shape[:-1] != k.shape[: positions.dim() - 1]:
        raise LayoutMismatch(f"positions of shape {list(positions.shape)} do not fit K of {list(k.shape)}")
    if positions.numel():
        if int(positions.min()) < 0 or int(positions.max()) >= tokens:
            raise LayoutMismatch(
                f"kept positions reach from {int(positions.min())} to {int(positions.max())}; there are {tokens} tokens"
            )
        if bool((positions.diff(dim=-1) <= 0).any()):
            raise LayoutMismatch("kept positions have to rise, each named once", code="layout.order")
    return positions


def take(x: Tensor, positions: Tensor, in_place: bool) -> Tensor:
    """The tokens at these positions, along the axis before the last."""
    if not in_place:
        return gathered(x, positions)
    kept = positions.shape[-1]
    for first in range(0, kept, STEP):
        part = positions[..., first : first + STEP]
        x[..., first : first + part.shape[-1], :] = gathered(x, part)
    return x[..., :kept, :]


def gathered(x: Tensor, positions: Tensor) -> Tensor:
    """A copy of the tokens at these positions; see `compact` for their shape."""
    if positions.dim() == 1:
        return x.index_select(-2, positions.to(x.device))
    shape = positions.shape[:-1] + (1,) * (x.dim() - 1 - positions.dim()) + positions.shape[-1:] + (1,)
    index = positions.to(x.device).view(shape).expand(*x.shape[:-2], positions.shape[-1], x.shape[-1])
    return x.gather(-2, index)


def new_places(tokens: int, positions: Tensor) -> Tensor:
    """Where each former token stands now, and -1 for those that are gone; int64 [tokens] of positions [kept]."""
    places = torch.full((tokens,), -1, dtype=torch.int64)
    places[positions] = torch.arange(len(positions))
    return places
