"""K's rotary embedding as numbers: K turned by the cosines and sines of its tokens, and turned back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlab.core.errors import CapabilityError

TOLERANCE = 1e-4
REMEDY = 'use placement="post_rope", which codes K as the cache is handed it'


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention (RoFormer, Su et al. 2021), float32.

    Parameters
    ----------
    x : Tensor
        [heads, tokens, head_dim].
    cos, sin : Tensor
        [tokens, head_dim], both halves equal, attention scaling included.
    """
    return x.float() * cos + half_turned(x.float()) * sin


def undo_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `apply_rope`: cos^2 + sin^2 is not 1 under attention scaling, nor in bfloat16."""
    return (x.float() * cos - half_turned(x.float()) * sin) / (cos.square() + sin.square())


def half_turned(x: Tensor) -> Tensor:
    """Each pair (i, i + head_dim / 2) turned by a quarter."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


@dataclass(frozen=True)
class RopeTurn:
    """The rotation of every token of one row; see `hf.sequences.Turn`."""

    cos: Tensor
    sin: Tensor

    def undo(self, x: Tensor, first: int) -> Tensor:
        """From attention to codec."""
        span = slice(first, first + x.shape[1])
        return undo_rope(x, self.cos[span], self.sin[span])

    def redo(self, x: Tensor, first: int) -> Tensor:
        """From codec to attention."""
        span = slice(first, first + x.shape[1])
        return apply_rope(x, self.cos[span], self.sin[span])

    @property
    def table(self) -> Tensor:
        """The cosines and after them the sines of a half [tokens, head_dim], as `pages.rope` takes them."""
        half = self.cos.shape[1] // 2
        return torch.cat([self.cos[:, :half], self.sin[:, :half]], dim=1)

    @cached_property
    def columns(self) -> tuple[NDArray, NDArray]:
        """The cosines and the sines of a half, a column for each token, float32 [head_dim / 2, tokens] on the CPU."""
        half = self.cos.shape[1] // 2
        return tuple(table[:, :half].T.contiguous().numpy() for table in (self.cos, self.sin))

    def along(self, spans: list[tuple[RopeTurn, int, int]]) -> RopeTurn:
        """See `hf.sequences.Turn`."""
        cos, sin = ([getattr(turn, name)[first : first + n] for turn, first, n in spans] for name in ("cos", "sin"))
        return RopeTurn(torch.cat(cos), torch.cat(sin))


def refuse_lossy(turn: RopeTurn, k: Tensor) -> None:
    """`CapabilityError` unless K [heads, tokens, head_dim], turned back and turned again, is what it was."""
    again = turn.redo(turn.undo(k, 0), 0)
    # written so that NaN is refused too
    if not (again - k.float()).abs().max() <= TOLERANCE * (1 + k.float().abs().max()):
        raise CapabilityError(
            f"this model's rotary embedding cannot be turned back; {REMEDY}", code="capability.lossy-rope"
        )
