"""The pages of one layer: K and V coded into slots, and read from them."""

from __future__ import annotations

from torch import Tensor

from kvlab.base.errors import CodecNotActive
from kvlab.cache.pages.rotary import Rotation, Unturned
from kvlab.cache.pages.rows import Rows


class LayerPages:
    """Codes into pages uint8 [blocks, 1, block_size, bytes], and counts.

    Parameters
    ----------
    layer : int
        Which one.
    k, v : Rows
        How a token's K and V lie; K's bytes come first.
    rotation : Rotation or Unturned
        What stands between K as attention sees it and as it is coded.
    """

    def __init__(self, layer: int, k: Rows, v: Rows, rotation: Rotation | Unturned):
        self.layer, self.k, self.v, self.rotation = layer, k, v, rotation
        self.written = self.read_back = 0

    @property
    def bytes(self) -> int:
        """What a token takes."""
        return self.k.bytes + self.v.bytes

    def write(self, k: Tensor, v: Tensor, pages: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Code tokens [kv_heads, n, head_dim], K as attention sees it, into their slots int64 [n].

        Raises
        ------
        NonFinite
            A value is NaN or infinite.
        CodecNotActive
            The pages are not of the size that the tokens take.
        """
        rows = self._rows(pages)
        rows[slots, : self.k.bytes] = self.k.encode(self.rotation.undo(k, positions).float())
        rows[slots, self.k.bytes :] = self.v.encode(v.float())
        self.written += len(slots)

    def read(self, pages: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K as attention sees it and V of slots int64 [n], float32 [kv_heads, n, head_dim]."""
        rows = self._rows(pages).index_select(0, slots)
        k, v = rows[:, : self.k.bytes].contiguous(), rows[:, self.k.bytes :].contiguous()
        self.read_back += len(slots)
        return self.rotation.redo(self.k.decode(k), positions), self.v.decode(v)

    def _rows(self, pages: Tensor) -> Tensor:
        """The pages as rows of tokens [slots, bytes]."""
        if pages.dim() != 4 or pages.shape[1] != 1 or pages.shape[3] != self.bytes or pages.element_size() != 1:
            raise CodecNotActive(
                f"layer {self.layer}: a token takes {self.bytes} bytes, and vLLM's pages are {list(pages.shape)} of"
                f" {pages.dtype}"
            )
        return pages.view(-1, self.bytes)
