"""The part of one layer's K or V that is also held decoded: its first columns, as many as were granted.

Attention looks at every token in every step, so that what is held may as well be the same tokens always: whatever is
exchanged for others would be wanted again a step later.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.cache.hf.sequences import Piece, Turn

GRAIN = 64  # columns by which the room grows


@dataclass(frozen=True)
class Grant:
    """How many columns K and V of a layer may hold decoded; None for all of them.

    K comes first: it has to be made whole before it is turned, where V's components are summed as they are.
    """

    columns: int | None

    @classmethod
    def of(cls, layer_bytes: int | None, column_bytes: int) -> Grant:
        """Of so many bytes for a layer, a column of K or V being of `column_bytes`."""
        return cls(None if layer_bytes is None else layer_bytes // column_bytes)

    def rooms(self, length: int) -> tuple[int, int]:
        """Columns of room for K and for V of `length` columns."""
        due = -(-length // GRAIN) * GRAIN
        if self.columns is None:
            return due, due
        k = min(self.columns, due)
        return k, min(self.columns - k, due)


class DecodedColumns:
    """The first columns of a stream as attention sees them [batch, heads, columns, head_dim], in the model's dtype.

    Columns of padding are zero; those of tokens that were not coded when they came say nothing.
    """

    def __init__(self):
        self._held: Tensor | None = None
        self.columns = 0

    @property
    def seen(self) -> Tensor | None:
        """What is held; None where that is nothing."""
        return self._held[:, :, : self.columns] if self.columns else None

    @property
    def nbytes(self) -> int:
        """Bytes of the room."""
        return 0 if self._held is None else self._held.nbytes

    def fit(self, room: int, like: Tensor) -> None:
        """Have room for so many columns; the last ones go where it becomes less."""
        if room == (0 if self._held is None else self._held.shape[2]):
            return
        self.columns = min(self.columns, room)
        if not room:
            self._held = None
            return
        held = like.new_zeros(*like.shape[:2], room, like.shape[3])
        if self.columns:
            held[:, :, : self.columns] = self._held[:, :, : self.columns]
        self._held = held

    def extend(self, before: int, after: int) -> None:
        """Take in the columns `before` to `after` of the cache, those that there is room for; zero until they are put.

        A window that has not all columns before these takes none.
        """
        if self._held is None or self.columns < before:
            return
        last = min(after, self._held.shape[2])
        self._held[:, :, before:last] = 0
        self.columns = max(self.columns, last)

    def put(self, piece: Piece, turns: list[Turn]) -> None:
        """Decode what was just coded, where it lies in the window."""
        if all(first >= self.columns for _, first in piece.places):
            return
        spans = [(turns[row], first, piece.tokens) for row, first in piece.places]
        decoded = turns[0].along(spans).redo(piece.decode(), 0).split(piece.tokens, dim=1)
        for (row, first), tokens in zip(piece.places, decoded, strict=True):
            last = min(first + piece.tokens, self.columns)
            if first < last:
                self._held[row, :, first:last] = tokens[:, : last - first].to(self._held.dtype)

    def select(self, indices: list[int]) -> None:
        """The rows of these indices."""
        if self._held is not None:
            self._held = self._held[indices]

    def crop(self, length: int) -> None:
        """The first `length` columns."""
        self.columns = min(self.columns, length)

    def fork(self) -> DecodedColumns:
        """One of its own."""
        twin = DecodedColumns()
        twin._held, twin.columns = None if self._held is None else self._held.clone(), self.columns
        return twin
