"""Which vectors share a block, and where the rows of a block belong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codecs.base import Place
from kvlab.codecs.block import BlockStream


@dataclass(frozen=True)
class TokenRun:
    """Rows of a block that are consecutive tokens of one head."""

    head: int
    tokens: slice
    rows: slice


@dataclass(frozen=True)
class Grid:
    """How [heads, tokens, head_dim] is cut into blocks of `block_size` rows, the last one of a series ragged.

    ``per_head`` cuts each head's tokens by themselves, one series per head; ``mixed_heads`` cuts one series
    of rows ordered token * heads + head, so that one block holds all heads of its tokens. Blocks are
    numbered along the series, one series after the other.
    """

    heads: int
    tokens: int
    mixed: bool
    block_size: int

    @classmethod
    def of(cls, shape: tuple[int, int, int], recipe: BlockStream) -> Grid:
        """The grid of a tensor under a recipe."""
        return cls(shape[0], shape[1], recipe.layout == "mixed_heads", recipe.block_size)

    @property
    def series(self) -> int:
        """Sequences of rows that are cut by themselves."""
        return 1 if self.mixed else self.heads

    @property
    def length(self) -> int:
        """Rows of a series."""
        return self.heads * self.tokens if self.mixed else self.tokens

    @property
    def per_series(self) -> int:
        """Blocks of a series."""
        return -(-self.length // self.block_size)

    @property
    def count(self) -> int:
        """Blocks."""
        return self.series * self.per_series

    def batches(self, rows: Tensor) -> list[tuple[Tensor, list[int]]]:
        """The blocks of [heads, tokens, dim] in batches of equal length, with their numbers.

        Returns
        -------
        list of (Tensor, list of int)
            The full blocks [blocks, block_size, dim] if there are any, then the ragged last blocks
            [series, remainder, dim] if there are any.
        """
        size, dim = self.block_size, rows.shape[-1]
        line = rows.transpose(0, 1).reshape(1, -1, dim) if self.mixed else rows
        full = self.length // size
        starts = [series * self.per_series for series in range(self.series)]
        found = []
        if full:
            numbers = [start + i for start in starts for i in range(full)]
            found.append((line[:, : full * size].reshape(-1, size, dim), numbers))
        if full * size < self.length:
            found.append((line[:, full * size :], [start + full for start in starts]))
        return found

    def span(self, number: int) -> tuple[int, int, int]:
        """Series, first row and row after the last one of a block."""
        series, place = divmod(number, self.per_series)
        return series, place * self.block_size, min((place + 1) * self.block_size, self.length)

    def runs(self, number: int) -> list[TokenRun]:
        """Where the rows of a block belong; one run, or for mixed heads one per head."""
        series, first, last = self.span(number)
        if not self.mixed:
            return [TokenRun(series, slice(first, last), slice(0, last - first))]
        runs = []
        for head in range(self.heads):
            start = (head - first) % self.heads
            rows = range(start, last - first, self.heads)
            token = (first + start) // self.heads
            if rows:
                runs.append(TokenRun(head, slice(token, token + len(rows)), slice(start, last - first, self.heads)))
        return runs

    def place(self, number: int) -> Place:
        """Index of a block into [heads, tokens, dim]."""
        series, first, last = self.span(number)
        if not self.mixed:
            return slice(series, series + 1), slice(first, last)
        rows = torch.arange(first, last)
        return rows % self.heads, rows // self.heads
