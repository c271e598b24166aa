"""`klt`'s blocks read for attention by compiled loops, a part of a sequence's tokens at a time.

A token is mean + components x inverse. K is made whole by a matrix product and turned while its scores are summed. Of V
the components are summed by attention's weights, and one product for each query makes that a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.hf.attention_view import SCRATCH
from kvlab.cache.hf.coder import StreamCoder
from kvlab.cache.hf.sequences import TokenRow, Turn
from kvlab.cache.rope_turn import RopeTurn
from kvlab.codecs.klt import columns_numba
from kvlab.codecs.klt.halves import scratch
from kvlab.codecs.klt.joining import arrays_of
from kvlab.codecs.klt.planes import Planes
from kvlab.codecs.klt.reading import refuse
from kvlab.codecs.klt.reading_numba import TileTables, further
from kvlab.codecs.klt.tiles_numba import Beside, add_beside
from kvlab.codecs.shared.grouping import parted


class KltColumns(TileTables):
    """Reads what one coder coded; see `attention_view.Reader`."""

    def __init__(self, coder: StreamCoder):
        super().__init__(coder.token_rows.plan)
        self.heads, self.head_dim = self.plan.heads, coder.shape[1]
        self.per, self.places = self.heads // self.groups, places_of(self.plan.planes)

    def scores(self, rows: Sequence[TokenRow], turns: Sequence[Turn], q: Tensor, first: int, out: Tensor) -> None:
        """See `attention_view.Reader`."""
        to_keys = self.to_tokens()
        for index, (row, turn) in enumerate(zip(rows, turns, strict=True)):
            for column, z, held, count in self._parts(row, first):
                k = scratch("keys", self.groups, self.width, z.shape[1])
                for own, mean, matrix, part in zip(k, self.plan.mean, to_keys, z.split(self.rows), strict=True):
                    torch.addmm(mean.mT, matrix.mT, part, out=own)
                add_beside(held, count, self.way, k.flatten(0, 1).numpy())
                out[index, :, :, column : column + z.shape[1]] = scored(
                    k.view(self.heads, self.head_dim, -1), q[index], turn, column
                )

    def mixed(self, rows: Sequence[TokenRow], weights: Tensor, first: int, out: Tensor) -> None:
        """See `attention_view.Reader`."""
        to_values = self.to_tokens()
        shared = weights.unflatten(1, (self.groups, self.per)).flatten(2, 3)
        for index, row in enumerate(rows):
            sums = [weights.new_zeros(shared.shape[2], len(matrix)) for matrix in to_values]
            for column, z, held, count in self._parts(row, first):
                own = shared[index, :, :, column : column + z.shape[1]]
                for found, weight, part in zip(sums, own, z.split(self.rows), strict=True):
                    found.addmm_(weight, part.mT)
                if count:
                    token, group, more = self.beside(held, count)
                    by_head = more.view(len(more), self.per, 1, self.head_dim)
                    weight = own[group, :, token].view(len(more), self.per, -1, 1)
                    heads = group[:, None] * self.per + torch.arange(self.per)
                    out[index].index_put_((heads,), weight * by_head, accumulate=True)
            for group, (found, matrix) in enumerate(zip(sums, to_values, strict=True)):
                by_head = matrix.unflatten(1, (self.per, -1)).transpose(0, 1)
                out[index, group * self.per : (group + 1) * self.per] += found.unflatten(0, (self.per, -1)) @ by_head
        out += weights[..., first:].sum(-1, keepdim=True) * parted(self.plan.mean, self.heads)

    def _parts(self, row: TokenRow, first: int) -> Iterator[tuple[int, Tensor, Beside, int]]:
        """Components of columns from `first` on, a part at a time: see `columns_numba.components`.

        The first column of each, float32 [rows of a tile, n], and what is beside them, and how many that are.
        """
        (data, pieces), end = gathered(row), row.length - row.waiting
        parts = max(1, -(-(end - first) // SCRATCH))
        size = -(-(end - first) // parts)
        size += -size % 16 if size > 16 else 0
        size += 16 * (size % 1024 == 0)
        for column in range(first, end, size):
            width = min(size, end - column)
            z = scratch("components", self.lines, width).zero_()
            held = further(width * self.groups * self.width if self.escapes.there else 0, "columns")
            count = columns_numba.components(
                data, pieces, column, self.places, self.active, self.escapes, *self.room(), z.numpy(), held
            )
            refuse(max(-count, 0))
            yield column, z, held, count


def gathered(row: TokenRow) -> tuple[np.ndarray, np.ndarray]:
    """All coded bytes of a row, and where which lie: `data` and `pieces` of `columns_numba.components`."""
    parts, pieces, at, column = [], [], 0, row.start + row.first
    for block in row.blocks:
        (array,) = arrays_of(block.encoded)
        pieces.append((at, column, block.tokens, block.encoded.shape[1]))
        parts.append(array)
        at, column = at + len(array), column + block.tokens
    if row.loose is not None:
        pieces.append((at, column, len(row.loose), 1))
        parts.append(row.loose.flatten())
    data = torch.cat(parts).numpy() if parts else np.zeros(0, np.uint8)
    return data, np.array(pieces, np.int64).reshape(-1, 4)


def scored(k: Tensor, q: Tensor, turn: Turn, column: int) -> Tensor:
    """Scores of q [heads, queries, d] at keys [heads, d, n] that are the turn's from `column` on."""
    if not isinstance(turn, RopeTurn):
        return q @ k
    out = q.new_empty(*q.shape[:2], k.shape[2])
    columns_numba.scores(k.numpy(), q.contiguous().numpy(), *turn.columns, column, out.numpy())
    return out


def places_of(planes: Planes) -> columns_numba.Places:
    """Planes as arrays."""
    sizes = [len(plane.rows) for plane in planes.planes]
    return columns_numba.Places(
        size=np.array([plane.size for plane in planes.planes], np.int64),
        start=np.cumsum([0, *sizes], dtype=np.int64),
        row=torch.cat([plane.rows for plane in planes.planes]).int().numpy(),
        up=torch.cat([plane.shift[:, 0] for plane in planes.planes]).numpy(),
    )
