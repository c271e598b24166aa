"""One sequence's K or V of one layer, held as coded blocks that grow as tokens come.

The first tokens stay as they are where the recipe says so (`sink`), and the last ones until they are no longer the last
(`recent`). A token is encoded once. A codec that codes every token by itself (`per_token`) codes the tokens of a
call at once, and their codes are joined to those of the tokens before; any other codec
needs `block_size` tokens, which wait as they are, exact, until a block is complete. Blocks are never
changed and never coded again, so that rows may share them (beams that have a prefix in common).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvlab.base.errors import CapabilityError
from kvlab.base.recipe import StreamRecipe
from kvlab.codec.base import Codec, Encoded, Site
from kvlab.codec.kept import Kept
from kvlab.codec.klt.joining import arrays_of, joiner, refilled
from kvlab.codec.names import CODECS, UNSTORED


class Turn(Protocol):
    """What stands between the tokens as attention sees them and as the codec does: the rotary embedding."""

    def undo(self, x: Tensor, first: int) -> Tensor:
        """Tokens `first`, `first` + 1, ... of the row, from attention to codec."""

    def redo(self, x: Tensor, first: int) -> Tensor:
        """The same tokens, from codec to attention."""


class Straight:
    """No turn: the codec sees what attention sees."""

    def undo(self, x: Tensor, first: int) -> Tensor:
        """`x` itself."""
        return x

    redo = undo


@dataclass(frozen=True)
class Block:
    """Coded tokens, of which the first `tokens` count: a crop may end inside a block that cannot be cut."""

    encoded: Encoded
    tokens: int


@dataclass(frozen=True)
class Row:
    """One sequence: padding that is not stored, coded blocks, then the exact tail [heads, tokens, head_dim].

    `head` are the first tokens, where they are kept as they are.
    """

    pads: int = 0
    blocks: tuple[Block, ...] = ()
    tail: Tensor | None = None
    head: Tensor | None = None

    @property
    def coded(self) -> int:
        """Tokens in blocks."""
        return sum(block.tokens for block in self.blocks)

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
        """All tokens but padding."""
        return self.first + self.coded + self.waiting

    @property
    def length(self) -> int:
        """All tokens, padding included."""
        return self.pads + self.held


class StreamCoder:
    """Codes rows of one layer's K or V, and counts what it does.

    Parameters
    ----------
    codec : Codec
        Built for the stream, without its ends (`registry.bare`).
    recipe : StreamRecipe
        Its `block_size`, where it has one, is the length of a block; its `sink` and `recent` tokens stay as they are.
    site : Site
        Layer and stream.
    heads, head_dim : int
        Shape of one token.

    Raises
    ------
    CapabilityError
        The codec is a control of measurements, which leaves nothing to hold.
    CalibrationMismatch
        The calibration does not fit the layer.
    """

    def __init__(self, codec: Codec, recipe: StreamRecipe, site: Site, heads: int, head_dim: int):
        self.codec, self.site, self.kept = codec, site, Kept.of(recipe)
        self.values_per_token = heads * head_dim
        self.size: int | None = getattr(recipe, "block_size", None)
        self.fires = self.read_back = 0
        if recipe.codec in UNSTORED:
            raise CapabilityError(
                f"codec {recipe.codec!r} writes no codes that a cache could hold; allowed: "
                + ", ".join(name for name in CODECS if name not in UNSTORED)
            )
        self.joiner = joiner(codec, site, heads, head_dim)

    def append(self, row: Row, x: Tensor, turn: Turn) -> tuple[Row, list[tuple[int, Encoded]]]:
        """`row` with further tokens [heads, tokens, head_dim], and what was coded: first token and its arrays."""
        missing = min(self.kept.sink - row.first, x.shape[1])
        if missing > 0:
            parts = [x[:, :missing]] if row.head is None else [row.head, x[:, :missing]]
            row, x = replace(row, head=torch.cat(parts, dim=1)), x[:, missing:]
        if x.shape[1] == 0:
            return row, []
        news = []
        if row.tail is not None:
            row, x = replace(row, tail=None), torch.cat([row.tail, x], dim=1)
        while (due := self._due(row, x.shape[1] - self.kept.recent)) > 0:
            row, new = self._stored(row, x[:, :due], turn)
            x = x[:, due:]
            news.append(new)
        return replace(row, tail=x.clone() if x.shape[1] else None), news

    def _due(self, row: Row, old: int) -> int:
        """How many of `old` tokens, which are no longer to be kept as they are, are coded next; 0 for none."""
        if self.codec.per_token:
            return min(self._room(row), old)
        return self.size if old >= self.size else 0

    def _room(self, row: Row) -> int:
        """Tokens that the next encoded piece may have."""
        if self.size is None:
            return sys.maxsize
        return self.size - row.blocks[-1].tokens if row.blocks and self._open(row.blocks[-1]) else self.size

    def _open(self, last: Block) -> bool:
        """Whether tokens can be laid after those of the block."""
        whole = last.tokens == last.encoded.shape[1] and (self.size is None or last.tokens < self.size)
        return whole and self.joiner is not None and self.joiner.fits(last.encoded)

    def _stored(self, row: Row, x: Tensor, turn: Turn) -> tuple[Row, tuple[int, Encoded]]:
        """Encode `x`, for the only time, and put it after the row's blocks."""
        first = row.pads + row.first + row.coded
        encoded = compact(self.codec.encode(turn.undo(x, first), self.site))
        self.fires += 1
        blocks = row.blocks
        if blocks and self._open(blocks[-1]) and self.joiner.fits(encoded):
            joined = self.joiner.join(blocks[-1].encoded, encoded)
            blocks = (*blocks[:-1], Block(joined, joined.shape[1]))
        else:
            blocks = (*blocks, Block(encoded, x.shape[1]))
        return replace(row, blocks=blocks), (first, encoded)

    def view(self, row: Row, turn: Turn, like: Tensor) -> Tensor:
        """The row as attention sees it, [heads, tokens, head_dim] in `like`'s dtype; padding is zero."""
        heads, head_dim = like.shape[-3], like.shape[-1]
        parts = [like.new_zeros(heads, row.pads, head_dim)]
        if row.head is not None:
            parts.append(row.head)
        if row.blocks:
            decoded = [self.codec.decode(block.encoded)[:, : block.tokens] for block in row.blocks]
            parts.append(turn.redo(torch.cat(decoded, dim=1), row.pads + row.first).to(like.dtype))
        if row.tail is not None:
            parts.append(row.tail)
        return torch.cat(parts, dim=1)

    def cropped(self, row: Row, length: int) -> Row:
        """The first `length` tokens; a block that cannot be cut is kept whole and counts as whole."""
        if length >= row.length:
            return row
        pads, coded = min(row.pads, length), row.coded
        first = min(row.first, length - pads)
        waiting = max(0, length - row.pads - row.first - coded)
        blocks, left = [], length - pads - first - waiting
        for block in row.blocks:
            if left <= 0:
                break
            blocks.append(self._cut(block, left) if left < block.tokens else block)
            left -= block.tokens
        head, tail = row.head[:, :first].clone() if first else None, row.tail[:, :waiting].clone() if waiting else None
        return Row(pads, tuple(blocks), tail, head)

    def _cut(self, block: Block, tokens: int) -> Block:
        whole = block.tokens == block.encoded.shape[1]
        if whole and self.joiner is not None and self.joiner.fits(block.encoded):
            return Block(self.joiner.cut(block.encoded, tokens), tokens)
        return Block(block.encoded, tokens)


def compact(encoded: Encoded) -> Encoded:
    """No array is a view of a larger one, so that what an array counts is what it holds."""
    return refilled(encoded, [a if a.untyped_storage().nbytes() == a.nbytes else a.clone() for a in arrays_of(encoded)])
