"""What one layer's attention may see of K or V in one call, not decoded yet.

A call of few tokens needs of K its scores and of V a weighted sum: both are taken block by block, so that never more
than a bounded number of tokens is decoded beside the window. Whoever wants the tensor itself gets it from `whole`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvlab.cache.hf.coder import StreamCoder
from kvlab.cache.hf.sequences import TokenRow, Turn
from kvlab.codecs.shared.apart import apart

SCRATCH = 1008  # tokens that are decoded at once


class Reader(Protocol):
    """Reads coded tokens of some rows for attention, from column `first` on; exact ones are somebody else's."""

    def scores(self, rows: Sequence[TokenRow], turns: Sequence[Turn], q: Tensor, first: int, out: Tensor) -> None:
        """Scores of queries [rows, heads, queries, head_dim] at coded keys into `out` [rows, heads, queries, columns].

        What stands in other columns from `first` on may be overwritten.
        """

    def mixed(self, rows: Sequence[TokenRow], weights: Tensor, first: int, out: Tensor) -> None:
        """Add to `out` [rows, heads, queries, head_dim] coded values by weights [rows, heads, queries, columns].

        Weights of columns that are not coded are zero.
        """


class BlockReader:
    """Reads by the codec's own decoder, a block of one row at a time."""

    def __init__(self, coder: StreamCoder):
        self.coder = coder

    def scores(self, rows: Sequence[TokenRow], turns: Sequence[Turn], q: Tensor, first: int, out: Tensor) -> None:
        """See `Reader`."""
        for index, row in enumerate(rows):
            for places, tokens, decode in self.coder.pieces(row):
                column = places[0][1]
                if column + tokens > first:
                    k = turns[index].redo(decode(), column).float()
                    out[index, :, :, column : column + tokens] = q[index] @ k.mT

    def mixed(self, rows: Sequence[TokenRow], weights: Tensor, first: int, out: Tensor) -> None:
        """See `Reader`."""
        for index, row in enumerate(rows):
            for places, tokens, decode in self.coder.pieces(row):
                column, after = places[0][1], places[0][1] + tokens
                if after > first:
                    v = decode()[:, max(0, first - column) :].float()
                    out[index] += weights[index, :, :, max(column, first) : after] @ v


class Unopened:
    """K or V of one layer in one call, as attention may see it, which is a tensor to whoever takes it for one.

    Subclasses give `whole`, `attend` and, as attributes, `like`: any tensor of the batch's heads, dtype and device.
    """

    like: Tensor

    def whole(self) -> Tensor:
        """All columns decoded [batch, heads, columns, head_dim]."""
        raise NotImplementedError

    def attend(self, query: Tensor, value: Unopened, mask: Tensor | None, scale: float) -> Tensor | None:
        """Attention over K, which this is, and V; None where that is not what is asked for.

        Parameters
        ----------
        query : Tensor
            [batch, heads, tokens, head_dim]; neighbouring heads share one of K and V.
        value : Unopened
            Of the same call.
        mask : Tensor or None
            What is seen where bool, or what is added to scores, [batch or 1, heads or 1, tokens, columns].
        scale : float
            Of the scores.

        Returns
        -------
        Tensor or None
            [batch, tokens, heads, head_dim] in the query's dtype.
        """
        raise NotImplementedError

    @property
    def columns(self) -> int:
        """All columns."""
        raise NotImplementedError

    @property
    def batch(self) -> int:
        """Rows."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        """As `whole` has it."""
        return torch.Size((self.batch, self.like.shape[1], self.columns, self.like.shape[3]))

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """Where it is decoded."""
        return self.like.device

    def __getattr__(self, name: str):
        """Of the tensor itself."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __getitem__(self, index):
        """Of the tensor itself."""
        return self.whole()[index]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Torch's functions are given the tensor itself."""

        def opened(value):
            if isinstance(value, list | tuple):
                return type(value)(map(opened, value))
            return value.whole() if isinstance(value, Unopened) else value

        return function(*map(opened, args), **{name: opened(value) for name, value in (kwargs or {}).items()})


@dataclass(frozen=True, eq=False)
class Stored(Unopened):
    """What `CodecLayer` stores.

    Parameters
    ----------
    coder : StreamCoder
        Of the stream.
    reader : Reader
        Reads what it coded.
    rows : tuple of Row
        What was stored when the call began, or after its tokens were, by what attention may see.
    turns : list of Turn
        Of each row.
    window : Tensor or None
        Columns that are decoded already [batch, heads, columns, head_dim].
    own : Tensor or None
        The call's tokens where they are seen as they are [batch, heads, tokens, head_dim].
    like : Tensor
        Any tensor of the batch's heads, dtype and device.
    """

    coder: StreamCoder
    reader: Reader
    rows: tuple[TokenRow, ...]
    turns: list[Turn]
    window: Tensor | None
    own: Tensor | None
    like: Tensor

    @property
    def length(self) -> int:
        """Columns that are stored."""
        return self.rows[0].length

    @property
    def columns(self) -> int:
        """All columns."""
        return self.length + (0 if self.own is None else self.own.shape[2])

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.rows)

    @property
    def known(self) -> int:
        """Columns of the window."""
        return 0 if self.window is None else self.window.shape[2]

    @torch.compiler.disable
    @apart
    def whole(self) -> Tensor:
        """All columns decoded [batch, heads, columns, head_dim]."""
        known = [None] * len(self.rows) if self.window is None else self.window
        parts = zip(self.rows, self.turns, known, strict=True)
        stored = torch.stack([self.coder.view(row, turn, self.like, own) for row, turn, own in parts])
        return stored if self.own is None else torch.cat([stored, self.own], dim=2)

    def attend(self, query: Tensor, value: Stored, mask: Tensor | None, scale: float) -> Tensor | None:
        """See `Unopened`."""
        batch, heads, tokens, head_dim = query.shape
        shown = mask is None and tokens == 1  # without a mask one token sees everything
        if not shown and not (isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] == self.columns):
            return None
        q = query.float() * scale
        scores = self.scores(q.reshape(batch, self.shape[1], -1, head_dim))
        if mask is not None:
            own = scores.view(batch, heads, tokens, -1)
            own.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else own.add_(mask)
        weights = scores.softmax(-1)
        if mask is not None:
            weights.nan_to_num_()  # a token of padding sees nothing
        out = value.mixed(weights).to(query.dtype)
        return out.view(batch, heads, tokens, head_dim).transpose(1, 2).contiguous()

    def scores(self, q: Tensor) -> Tensor:
        """Scores of queries float32 [batch, heads, queries, head_dim] at every column, float32."""
        out = q.new_empty(*q.shape[:3], self.columns)
        for first, k in self._known():
            out[..., first : first + k.shape[2]] = q @ k.mT
        if self._beyond():
            self.reader.scores(self.rows, self.turns, q, self.known, out)
        if self.own is not None:
            out[..., self.length :] = q @ self.own.float().mT
        for index, row in enumerate(self.rows):
            out[index, :, :, : row.start] = 0
            for column, k in row.exact:
                out[index, :, :, column : column + k.shape[1]] = q[index] @ k.float().mT
        return out

    def mixed(self, weights: Tensor) -> Tensor:
        """Values summed by weights float32 [batch, heads, queries, columns], float32; the weights are used up."""
        out = weights.new_zeros(*weights.shape[:3], self.like.shape[-1])
        if self.own is not None:
            out += weights[..., self.length :] @ self.own.float()
        for index, row in enumerate(self.rows):
            weights[index, :, :, : row.start] = 0
            for column, v in row.exact:
                own = weights[index, :, :, column : column + v.shape[1]]
                out[index] += own @ v.float()
                own.zero_()
        for first, v in self._known():
            out += weights[..., first : first + v.shape[2]] @ v
        if self._beyond():
            self.reader.mixed(self.rows, weights[..., : self.length], self.known, out)
        return out

    def _beyond(self) -> bool:
        """Whether there are coded columns after the window."""
        return any(row.length - row.waiting > self.known and row.coded for row in self.rows)

    def _known(self):
        """The window a part at a time, float32, and the first column of each."""
        if self.window is None:
            return
        if self.window.dtype == torch.float32:
            yield 0, self.window
            return
        step = max(16, SCRATCH // len(self.rows))
        for first in range(0, self.known, step):
            yield first, self.window[:, :, first : first + step].float()
