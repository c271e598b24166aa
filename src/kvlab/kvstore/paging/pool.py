"""The resident pool: one tensor of blocks, which of them are free, and rows read out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.core.errors import ParamsError
from kvlab.kvstore.paging.free_pages import FreePages
from kvlab.kvstore.paging.geometry import Geometry, K, V


@dataclass(frozen=True)
class Gathered:
    """What attention of one layer reads.

    Attributes
    ----------
    k, v : Tensor
        [kv_heads, rows, head_dim] in the geometry's dtype; contiguous copies.
    positions : Tensor
        int64 [rows], the logical position of each row. A mask is a function of these, never of the column.
    """

    k: Tensor
    v: Tensor
    positions: Tensor


class BlockPool:
    """Blocks of one chunk each.

    What a free block holds is never read: rows are addressed by the chunks that lie in the pool.

    Parameters
    ----------
    geometry : Geometry
    blocks : int
        How many.
    device : str
        Where torch keeps them.
    order : sequence of int or None
        In which order blocks are handed out at first, any permutation; 0, 1, 2, .. when None.

    Raises
    ------
    ParamsError
        When `order` is no permutation of the blocks.
    """

    def __init__(self, geometry: Geometry, blocks: int, device: str, order: Sequence[int] | None = None):
        order = range(blocks) if order is None else order
        if len(order) != blocks:
            raise ParamsError(
                f"the order of {blocks} blocks has to name each once, not {list(order)}", code="params.no-permutation"
            )
        self.geometry, self.blocks = geometry, blocks
        self.data = torch.empty(blocks, *geometry.chunk_shape, dtype=geometry.torch_dtype, device=device)
        self._pages = FreePages(order)
        self.take, self.give = self._pages.take, self._pages.give

    @property
    def free(self) -> list[int]:
        """Free blocks, the one to be handed out next last."""
        return self._pages.stack

    def load(self, block: int, payload: Tensor) -> None:
        """Copy a payload into a block."""
        self.data[block].copy_(payload)

    def payload(self, block: int) -> Tensor:
        """A copy of a block on the CPU."""
        return self.data[block].to("cpu", copy=True)

    def write(self, block: int, layer: int, row: int, k: Tensor, v: Tensor) -> None:
        """Put rows of one layer [kv_heads, n, head_dim] into a block, from its row `row` on."""
        rows = slice(row, row + k.shape[1])
        self.data[block, layer, K, :, rows] = k.detach()
        self.data[block, layer, V, :, rows] = v.detach()

    def gather(self, layer: int, placed: Sequence[tuple[int, int]], end: int) -> Gathered:
        """The rows of these chunks that lie below a position, chunk by chunk in the order given.

        Parameters
        ----------
        layer : int
        placed : sequence of (int, int)
            (chunk, block) pairs.
        end : int
            The first position that is left out.
        """
        positions, rows = self.positions(placed, end)
        blocks = torch.tensor([block for _, block in placed], dtype=torch.int64, device=self.data.device)
        k, v = (self._rows(layer, stream, blocks)[:, rows].contiguous() for stream in (K, V))
        return Gathered(k, v, positions)

    def positions(self, placed: Sequence[tuple[int, int]], end: int) -> tuple[Tensor, slice | Tensor]:
        """The positions of these rows, and which of the chunks' rows they are; see `gather`."""
        device, size = self.data.device, self.geometry.chunk_tokens
        chunks = torch.tensor([chunk for chunk, _ in placed], dtype=torch.int64, device=device)
        positions = (chunks[:, None] * size + torch.arange(size, device=device)).flatten()
        below = positions < end
        count = int(below.sum())
        rows = slice(count) if bool(below[:count].all()) else below  # in logical order only the end is left out
        return positions[rows], rows

    def _rows(self, layer: int, stream: int, blocks: Tensor) -> Tensor:
        """[kv_heads, blocks * chunk_tokens, head_dim]."""
        return self.data[:, layer, stream].transpose(0, 1).index_select(1, blocks).flatten(1, 2)
