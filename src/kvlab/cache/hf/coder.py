"""One sequence's K or V of one layer, held as coded blocks that grow as tokens come.

The first tokens stay as they are where the recipe says so (`sink`), and the last ones until they are no longer the last
(`recent`). A token is encoded once. A codec that codes every token by itself (`per_token`) codes the tokens of a
call at once, and their codes are joined to those of the tokens before; any other codec
needs `block_size` tokens, which wait as they are, exact, until a block is complete. Blocks are never
changed and never coded again, so that rows may share them (beams that have a prefix in common).

`klt` packs digits of several tokens into a byte, so that to join a token means to pack a block anew. Its tokens that
come a few at a time are therefore rows of bytes (`pages.rows`), coded for all sequences at once, until there are enough
of them for a block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvlab.cache.hf.sequences import Block, Piece, TokenRow, Turn
from kvlab.codecs.base import Codec, Encoded, Site
from kvlab.codecs.catalogue import TENSORWISE, UNSTORED
from kvlab.codecs.klt.codec import KltCodec
from kvlab.codecs.klt.joining import arrays_of, joiner, refilled
from kvlab.codecs.klt.rows import KltRows
from kvlab.codecs.shared.exact_tokens import ExactTokens
from kvlab.core.errors import CapabilityError
from kvlab.core.recipe import StreamRecipe

LOOSE = 64  # tokens that are rows of bytes before they are a block: whole bytes in every plane


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
    on_cpu : bool
        Whether the tokens are; only there can a few of `klt` be rows of bytes.

    Raises
    ------
    CapabilityError
        The codec is a control of measurements, which leaves nothing to hold.
    CalibrationMismatch
        The calibration does not fit the layer.
    """

    def __init__(self, codec: Codec, recipe: StreamRecipe, site: Site, heads: int, head_dim: int, on_cpu: bool = True):
        self.codec, self.site, self.kept = codec, site, ExactTokens.of(recipe)
        self.shape = heads, head_dim
        self.size: int | None = getattr(recipe, "block_size", None)
        self.fires = self.read_back = 0
        if recipe.codec in UNSTORED:
            raise CapabilityError(
                f"codec {recipe.codec!r} writes no codes that a cache could hold; allowed: "
                + ", ".join(name for name in TENSORWISE if name not in UNSTORED),
                code="capability.no-codes",
            )
        self.joiner = joiner(codec, site, heads, head_dim)
        strewing = on_cpu and isinstance(codec, KltCodec)
        self.token_rows = KltRows(codec, site, heads, head_dim) if strewing else None
        self.loose = min(LOOSE, self.size) if self.token_rows else 0

    @property
    def values_per_token(self) -> int:
        """Numbers that a token is."""
        return self.shape[0] * self.shape[1]

    def append(
        self, rows: list[TokenRow], parts: list[Tensor], turns: list[Turn]
    ) -> tuple[list[TokenRow], list[Piece]]:
        """`rows` with further tokens [heads, tokens, head_dim] each, and what was coded."""
        taken = [self._taken(row, x) for row, x in zip(rows, parts, strict=True)]
        rows, due = [row for row, _ in taken], [x for _, x in taken]
        counts = {x.shape[1] for x in due} - {0}
        if self.loose and counts and max(counts) < self.loose:
            return self._strewn(rows, due, turns)
        news = []
        for index, (x, turn) in enumerate(zip(due, turns, strict=True)):
            if self.loose and x.shape[1]:
                rows[index] = self._bundled(rows[index])
            while x.shape[1]:
                count = min(self._room(rows[index]), x.shape[1]) if self.codec.per_token else self.size
                rows[index], new = self._stored(index, rows[index], x[:, :count], turn)
                x = x[:, count:]
                news.append(new)
        return rows, news

    def _taken(self, row: TokenRow, x: Tensor) -> tuple[TokenRow, Tensor]:
        """The row with its new exact ends, and the tokens that are coded now."""
        missing = min(self.kept.sink - row.first - row.gone, x.shape[1])
        if missing > 0:
            parts = [x[:, :missing]] if row.head is None else [row.head, x[:, :missing]]
            row, x = replace(row, head=torch.cat(parts, dim=1)), x[:, missing:]
        if row.tail is not None:
            x = torch.cat([row.tail, x], dim=1)
        due = max(0, x.shape[1] - self.kept.recent)
        if not self.codec.per_token:
            due = due // self.size * self.size
        tail = x[:, due:].clone() if due < x.shape[1] else None
        return (row if tail is row.tail is None else replace(row, tail=tail)), x[:, :due]

    def _strewn(self, rows: list[TokenRow], due: list[Tensor], turns: list[Turn]) -> tuple[list[TokenRow], list[Piece]]:
        """Encode a few tokens of each row, all at once."""
        firsts = [row.start + row.first + row.coded for row in rows]
        lengths = [x.shape[1] for x in due]
        turn = turns[0].along(list(zip(turns, firsts, lengths, strict=True)))
        coded = self.token_rows.encode(turn.undo(torch.cat(due, dim=1), 0))
        news, at = list(rows), 0
        for index, (row, count) in enumerate(zip(rows, lengths, strict=True)):
            if count:
                own, at = coded[at : at + count], at + count
                row = self._bundled(row) if row.strewn + count > self.loose else row
                loose = own.clone() if row.loose is None else torch.cat([row.loose, own])
                row = replace(row, loose=loose)
                news[index] = self._bundled(row) if row.strewn >= self.loose else row
        self.fires += sum(count > 0 for count in lengths)
        if len(set(lengths)) == 1:
            places = list(enumerate(firsts))
            return news, [Piece(places, lengths[0], lambda: self.token_rows.decode(coded))]
        parts = zip(enumerate(firsts), lengths, coded.split(lengths), strict=True)
        return news, [self._loose_piece(*place, part) for place, count, part in parts if count]

    def _loose_piece(self, index: int, column: int, loose: Tensor) -> Piece:
        return Piece([(index, column)], len(loose), lambda: self.token_rows.decode(loose))

    def _bundled(self, row: TokenRow) -> TokenRow:
        """The row with its loose tokens as a block."""
        if row.loose is None:
            return row
        planes, count = self.token_rows.plan.planes, row.strewn
        symbols = planes.unpack(row.loose, 1)[..., 0]
        data = planes.pack(symbols.T[None].contiguous())[0]
        heads, head_dim = self.shape
        shape = (heads, count, head_dim)
        encoded = compact(Encoded(shape, self.site.layer, self.site.stream, shared=(), blocks=((data,),)))
        return replace(row, blocks=(*row.blocks, Block(encoded, count)), loose=None)

    def _room(self, row: TokenRow) -> int:
        """Tokens that the next encoded piece may have."""
        if self.size is None:
            return sys.maxsize
        return self.size - row.blocks[-1].tokens if row.blocks and self._open(row.blocks[-1]) else self.size

    def _open(self, last: Block) -> bool:
        """Whether tokens can be laid after those of the block."""
        if self.loose:
            return False
        whole = last.tokens == last.encoded.shape[1] and (self.size is None or last.tokens < self.size)
        return whole and self.joiner is not None and self.joiner.fits(last.encoded)

    def _stored(self, index: int, row: TokenRow, x: Tensor, turn: Turn) -> tuple[TokenRow, Piece]:
        """Encode `x`, for the only time, and put it after the row's blocks."""
        first = row.start + row.first + row.coded
        encoded = compact(self.codec.encode(turn.undo(x, first), self.site))
        self.fires += 1
        blocks = row.blocks
        if blocks and self._open(blocks[-1]) and self.joiner.fits(encoded):
            joined = self.joiner.join(blocks[-1].encoded, encoded)
            blocks = (*blocks[:-1], Block(joined, joined.shape[1]))
        else:
            blocks = (*blocks, Block(encoded, x.shape[1]))
        return replace(row, blocks=blocks), Piece([(index, first)], x.shape[1], lambda: self.codec.decode(encoded))

    def pieces(self, row: TokenRow) -> Iterator[Piece]:
        """What of a row is coded, in its order; each is named as of row 0."""
        column = row.start + row.first
        for block in row.blocks:
            yield Piece([(0, column)], block.tokens, lambda own=block: self.codec.decode(own.encoded)[:, : own.tokens])
            column += block.tokens
        if row.loose is not None:
            yield self._loose_piece(0, column, row.loose)

    def view(self, row: TokenRow, turn: Turn, like: Tensor, known: Tensor | None = None) -> Tensor:
        """The row as attention sees it, [heads, tokens, head_dim] in `like`'s dtype; padding is zero.

        `known` are its first columns as they are seen, decoded before.
        """
        heads, head_dim = self.shape
        out, after = like.new_zeros(heads, row.length, head_dim), 0
        if known is not None:
            after = known.shape[1]
            out[:, :after] = known
        for places, tokens, decode in self.pieces(row):
            first = places[0][1]
            if first + tokens > after:
                out[:, first : first + tokens] = turn.redo(decode(), first)
        for column, end in row.exact:
            out[:, column : column + end.shape[1]] = end
        return out

    def cropped(self, row: TokenRow, length: int) -> TokenRow:
        """The first `length` tokens; a block that cannot be cut is kept whole and counts as whole."""
        if length >= row.length:
            return row
        pads, coded = min(row.pads, length), row.coded
        start = pads + row.gone
        first = min(row.first, length - start)
        waiting = max(0, length - row.start - row.first - coded)
        blocks, left = [], length - start - first - waiting
        for block in row.blocks:
            if left <= 0:
                break
            blocks.append(self._cut(block, left) if left < block.tokens else block)
            left -= block.tokens
        loose = row.loose[:left].clone() if left > 0 and row.loose is not None else None
        head, tail = row.head[:, :first].clone() if first else None, row.tail[:, :waiting].clone() if waiting else None
        return TokenRow(pads, tuple(blocks), tail, head, loose, row.gone)

    def without(self, row: TokenRow, column: int) -> TokenRow:
        """The row without what ends before a column: its exact head, then whole blocks."""
        head, blocks, gone = row.head, list(row.blocks), row.gone
        if head is not None and row.start + row.first <= column:
            head, gone = None, gone + row.first
        while head is None and blocks and row.pads + gone + blocks[0].tokens <= column:
            gone += blocks.pop(0).tokens
        return row if gone == row.gone else replace(row, head=head, blocks=tuple(blocks), gone=gone)

    def _cut(self, block: Block, tokens: int) -> Block:
        whole = block.tokens == block.encoded.shape[1]
        if whole and self.joiner is not None and self.joiner.fits(block.encoded):
            return Block(self.joiner.cut(block.encoded, tokens), tokens)
        return Block(block.encoded, tokens)


def compact(encoded: Encoded) -> Encoded:
    """No array is a view of a larger one, so that what an array counts is what it holds."""
    return refilled(encoded, [a if a.untyped_storage().nbytes() == a.nbytes else a.clone() for a in arrays_of(encoded)])
