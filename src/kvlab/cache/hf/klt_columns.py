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
from kvlab.cache.hf.rope import RopeTurn
from kvlab.cache.hf.rows import TokenRow, Turn
from kvlab.codecs.klt import columns_numba
from kvlab.codecs.klt.grouping import parted
from kvlab.codecs.klt.halves import scratch
from kvlab.codecs.klt.joining import arrays_of
from kvlab.codecs.klt.planes import Planes
from kvlab.codecs.klt.reading import refuse
from kvlab.codecs.klt.reading_numba import escapes_of, values_of


class KltColumns:
    """Reads what one coder coded; see `attention_view.Reader`."""

    def __init__(self, coder: StreamCoder):
        self.plan = plan = coder.token_rows.plan
        self.heads, self.groups, self.width = plan.heads, plan.groups, plan.width
        self.per, self.head_dim = self.heads // self.groups, coder.shape[1]
        self.places, self.escapes = places_of(plan.planes), escapes_of(plan)
        constant = plan.widths == 0
        self.order = columns_numba.Order(*values_of(plan), constant.to(torch.uint8).numpy())
        # components before the last one that has bits: those after it are zeros in usual vectors
        self.coded = int(((~constant) * torch.arange(1, self.width + 1)).max())
        usual = torch.where(constant, plan.trees.of(plan.trees.first, 0), 0.0)
        mean = torch.baddbmm(plan.mean, usual[:, None], plan.back.full())
        self.mean_key, self.mean_value = mean.mT, parted(mean, self.heads)

    def scores(self, rows: Sequence[TokenRow], turns: Sequence[Turn], q: Tensor, first: int, out: Tensor) -> None:
        """See `attention_view.Reader`."""
        to_keys = self.plan.inverse.mT
        for index, (row, turn) in enumerate(zip(rows, turns, strict=True)):
            for column, z, escaped in self._parts(row, first):
                k = self._keys(to_keys, z, escaped).view(self.heads, self.head_dim, -1)
                out[index, :, :, column : column + z.shape[2]] = scored(k, q[index], turn, column)

    def _keys(self, to_keys: Tensor, z: Tensor, escaped: Tensor) -> Tensor:
        """Keys [groups, per * head_dim, n]: of usual vectors the components that have bits say all."""
        k = scratch("k", self.groups, self.per * self.head_dim, z.shape[2])
        torch.baddbmm(self.mean_key, to_keys[..., : self.coded], z[:, : self.coded], out=k)
        if len(escaped):
            k.index_add_(2, escaped, to_keys[..., self.coded :] @ z[:, self.coded :].index_select(2, escaped))
        return k

    def mixed(self, rows: Sequence[TokenRow], weights: Tensor, first: int, out: Tensor) -> None:
        """See `attention_view.Reader`."""
        shared = weights.unflatten(1, (self.groups, self.per)).flatten(2, 3)
        found = weights.new_zeros(len(rows), self.groups, shared.shape[2], self.width + 1)
        for index, row in enumerate(rows):
            for column, z, _ in self._parts(row, first):
                found[index].baddbmm_(shared[index, :, :, column : column + z.shape[2]], z.mT)
        components = found.view(len(rows), self.groups, self.per, -1, self.width + 1)
        to_values = self.plan.inverse.unflatten(2, (self.per, -1)).transpose(1, 2)
        share = weights[..., first:].sum(-1, keepdim=True)
        out += (components @ to_values).flatten(1, 2) + share * self.mean_value

    def _parts(self, row: TokenRow, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Components of columns from `first` on, a part at a time: see `columns_numba.components`.

        The first column of each, float32 [groups, width + 1, n], and which of the n were escaped.
        """
        (data, pieces), end = gathered(row), row.length - row.waiting
        parts = max(1, -(-(end - first) // SCRATCH))
        size = -(-(end - first) // parts)
        size += -size % 16 if size > 16 else 0
        size += 16 * (size % 1024 == 0)
        for column in range(first, end, size):
            width = min(size, end - column)
            z, escaped = scratch("z", self.groups, self.width + 1, width).zero_(), torch.zeros(width, dtype=torch.uint8)
            fault = columns_numba.components(
                data, pieces, column, self.places, self.order, self.escapes, z.numpy(), escaped.numpy()
            )
            refuse(fault)
            yield column, z, escaped.nonzero()[:, 0]


def gathered(row: TokenRow) -> tuple[np.ndarray, np.ndarray]:
    """All coded bytes of a row, and where which lie: `data` and `pieces` of `columns_numba.components`."""
    parts, pieces, at, column = [], [], 0, row.pads + row.first
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
