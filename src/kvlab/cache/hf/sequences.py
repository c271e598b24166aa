"""What is held of one sequence's K or V of one layer, and what stands between attention and a codec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from kvlab.codecs.base import Encoded


class Turn(Protocol):
    """What stands between the tokens as attention sees them and as the codec does: the rotary embedding."""

    def undo(self, x: Tensor, first: int) -> Tensor:
        """Tokens `first`, `first` + 1, ... of the row, from attention to codec."""

    def redo(self, x: Tensor, first: int) -> Tensor:
        """The same tokens, from codec to attention."""

    def along(self, spans: list[tuple[Turn, int, int]]) -> Turn:
        """That of parts of rows laid one after the other: each row's own, its first token and how many."""


class Straight:
    """No turn: the codec sees what attention sees."""

    def undo(self, x: Tensor, first: int) -> Tensor:
        """`x` itself."""
        return x

    redo = undo

    def along(self, spans: list[tuple[Turn, int, int]]) -> Turn:
        """Itself."""
        return self


@dataclass(frozen=True)
class Block:
    """Coded tokens, of which the first `tokens` count: a crop may end inside a block that cannot be cut."""

    encoded: Encoded
    tokens: int


@dataclass(frozen=True)
class TokenRow:
    """One sequence: padding that is not stored, coded blocks, then the exact tail [heads, tokens, head_dim].

    `tail` holds the tokens that the recipe's `recent` keeps exact, and those that wait until they fill a block; `head`
    those of `sink`. `loose` are coded tokens after the blocks, as rows uint8 [tokens, bytes]. `gone` are first tokens
    that are no longer stored, as a layer's window has left them; their columns stay.
    """

    pads: int = 0
    blocks: tuple[Block, ...] = ()
    tail: Tensor | None = None
    head: Tensor | None = None
    loose: Tensor | None = None
    gone: int = 0

    @property
    def start(self) -> int:
        """Column of the first token that is stored."""
        return self.pads + self.gone

    @property
    def coded(self) -> int:
        """Tokens in blocks and loose ones."""
        return sum(block.tokens for block in self.blocks) + self.strewn

    @property
    def strewn(self) -> int:
        """Loose tokens."""
        return 0 if self.loose is None else len(self.loose)

    @property
    def first(self) -> int:
        """Tokens in the exact head."""
        return 0 if self.head is None else self.head.shape[1]

    @property
    def waiting(self) -> int:
        """Tokens in the exact tail."""
        return 0 if self.tail is None else self.tail.shape[1]

    @property
    def held(self) -> int:
        """All tokens that are stored."""
        return self.first + self.coded + self.waiting

    @property
    def length(self) -> int:
        """All tokens, padding included, and those that are gone."""
        return self.start + self.held

    @property
    def exact(self) -> list[tuple[int, Tensor]]:
        """What is stored as it came, head and tail, with their first tokens' columns."""
        ends = [(self.start, self.head), (self.length - self.waiting, self.tail)]
        return [(column, end) for column, end in ends if end is not None]


class Piece(NamedTuple):
    """Neighbouring coded tokens of one row, or of as many neighbouring ones of several."""

    places: list[tuple[int, int]]
    """The rows that they are of, and the column of the first token in each."""
    tokens: int
    decode: Callable[[], Tensor]
    """Makes them, one row's after the other's, float32 [heads, rows * tokens, head_dim]."""
