"""The pages of one layer: K and V coded into slots, and read from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvlab.cache.pages.attention import Attended, Keys, attend, compiled
from kvlab.cache.pages.exact import ExactStore, by_loops, keep_exact, singles_beside
from kvlab.cache.pages.rope import MeanByPosition, Rotation, Unturned
from kvlab.cache.pages.step import ExactStep, ServerStep
from kvlab.cache.pages.token_bytes import Rows
from kvlab.codecs.klt.reading import Looked, RowReader
from kvlab.codecs.klt.rows import KltRows
from kvlab.core.errors import CodecNotActive

if TYPE_CHECKING:
    from kvlab.codecs.klt.reading_numba import TileAttention
    from kvlab.codecs.klt.served_numba import ServedAttention
    from kvlab.codecs.klt.served_writing_numba import ServedWriter


class LayerPages:
    """Codes into pages uint8 [blocks, 1, block_size, bytes], and counts.

    Parameters
    ----------
    layer : int
        Which one.
    k, v : Rows
        How a token's K and V lie; K's bytes come first.
    rotation : Rotation, MeanByPosition or Unturned
        What stands between K as attention sees it and as it is coded.
    exact : ExactStore or None
        Of all layers, where the recipe keeps recent tokens or sinks exact.
    loops : bool
        Whether compiled loops may read and write, where they are to be had.
    """

    on_gpu = False

    def __init__(
        self,
        layer: int,
        k: Rows,
        v: Rows,
        rotation: Rotation | MeanByPosition | Unturned,
        exact: ExactStore | None = None,
        loops: bool = True,
    ):
        self.layer, self.rotation, self.exact, self.loops = layer, rotation, exact, loops
        self.store = exact.values[layer] if exact else None
        self.quick = (quick(k), quick(v)) if loops else (None, None)
        self.k, self.v = (writer(rows, own) for rows, own in zip((k, v), self.quick, strict=True))
        self.attention, self.put = compiled_loops(*self.quick, rotation.by_position)
        self.forget()

    def forget(self) -> None:
        """Count from nothing: tokens coded, tokens read coded, queries that read exact tokens."""
        self.written = self.read_back = self.read_exact = 0

    @property
    def bytes(self) -> int:
        """What a token takes."""
        return self.k.bytes + self.v.bytes

    def write(
        self,
        k: Tensor,
        v: Tensor,
        pages: Tensor,
        slots: Tensor,
        positions: Tensor,
        exact: ExactStep | None = None,
        store: Tensor | None = None,
    ) -> None:
        """Code tokens [n, kv_heads, head_dim], K as attention sees it, into their slots int64 [n].

        With `exact` and the layer's `store` (`pages.exact.keep_exact`), those that later ones read exact are kept too.

        Raises
        ------
        NonFinite
            A value is NaN or infinite.
        CodecNotActive
            The pages are not of the size that the tokens take.
        """
        rows, turn = self._rows(pages), self.rotation.rows
        kept = (exact.kept, store) if self.put and exact and by_loops(store, k) else ()
        if self.put and self.put(k, v, rows.numpy(), slots.numpy(), self.k.bytes, turn, positions.numpy(), *kept):
            exact = None if kept else exact  # in the same call
        elif self.attention and not self.rotation.by_position:
            self.k.write(k.transpose(0, 1), rows, slots.numpy(), 0, turn, positions.numpy())
            self.v.write(v.transpose(0, 1), rows, slots.numpy(), self.k.bytes)
        else:
            rows[slots, : self.k.bytes] = self.k.encode(self.rotation.undo(k.transpose(0, 1), positions).float())
            rows[slots, self.k.bytes :] = self.v.encode(v.transpose(0, 1).float())
        if exact:
            keep_exact(k, v, store, exact, self.loops)
        self.written += len(slots)

    def read(self, pages: Tensor, slots: Tensor, positions: Tensor) -> Keys:
        """Tokens of slots int64 [n].

        By the compiled loop where there is one; its tokens are those of `Rows.decode` to the rounding of a sum.
        """
        rows, after = self._rows(pages), self.k.bytes
        self.read_back += len(slots)
        quick_k, quick_v = self.quick
        k = quick_k.tokens(quick_k.read(rows, slots, 0)) if quick_k else self.k.decode(rows[slots, :after])
        v = quick_v.tokens(quick_v.read(rows, slots, after)) if quick_v else self.v.decode(rows[slots, after:])
        return Keys(self.rotation.redo(k, positions), v)

    def attend(
        self, pages: Tensor, query: Tensor, step: ServerStep, scale: float, store: Tensor | None = None
    ) -> Attended:
        """Attention of a step's queries [tokens, heads, head_dim] over the coded tokens that each reads.

        By the compiled loop where there is one and a sequence has few queries. With the layer's `store`, the means of
        queries that are the only one of their sequence are of what they read exact, too.
        """
        if store is not None and self.put and step.all_few and by_loops(store, query):
            return self.attend_few(pages, step.few[1], query, scale, step.exact.singles, store)

        def read(slots: Tensor, positions: Tensor) -> Keys:
            return self.read(pages, slots, positions)

        def few(looked: Looked, q: Tensor) -> Attended:
            return self.attend_few(pages, looked, q, scale)

        found = attend(query, read, step, scale, few if self.attention else None)
        if store is not None:
            singles_beside(found, query, store, step.exact, scale, self.loops)
        return found

    def attend_few(self, pages: Tensor, looked: Looked, query: Tensor, scale: float, *kept) -> Attended:
        """Attention of few queries [n, heads, head_dim] by the compiled loop, which may be given exact tokens, too."""
        self.read_back += len(looked.slots)
        rows = self._rows(pages).numpy()
        return Attended(*self.attention(rows, self.k.bytes, looked, query, scale, self.rotation.columns, *kept))

    def _rows(self, pages: Tensor) -> Tensor:
        """The pages as rows of tokens [slots, bytes]."""
        shape = pages.shape
        if len(shape) != 4 or shape[1] != 1 or shape[3] != self.bytes or pages.element_size() != 1:
            raise CodecNotActive(
                f"layer {self.layer}: a token takes {self.bytes} bytes, and vLLM's pages are {list(shape)} of"
                f" {pages.dtype}",
                code="not-active.page-shape",
            )
        return pages.view(-1, self.bytes)


def writer(rows: Rows, own: RowReader | None) -> Rows:
    """What writes rows: the compiled loops of `klt` where such read them, the same bytes sooner."""
    if own is None:
        return rows
    from kvlab.codecs.klt.writing_numba import QuickRows

    return QuickRows(rows, own.read)


def quick(rows: Rows) -> RowReader | None:
    """The compiled way to read rows where they are; None where their codec has none, or nothing compiles it."""
    if not (isinstance(rows, KltRows) and rows.plan.mean.device.type == "cpu" and compiled()):
        return None
    from kvlab.codecs.klt.reading_numba import TileLoop
    from kvlab.codecs.klt.served_numba import ServedLoop

    return RowReader(rows.plan, (TileLoop if rows.plan.escaping else ServedLoop)(rows.plan))


def compiled_loops(
    k: RowReader | None, v: RowReader | None, by_position: bool
) -> tuple[TileAttention | ServedAttention | None, ServedWriter | None]:
    """Attention of few queries over both streams, and what writes tokens; None where torch does it."""
    if not k or not v:
        return None, None
    from kvlab.codecs.klt import reading_numba, served_numba, served_writing_numba

    if not by_position:
        return reading_numba.TileAttention(k, v), None
    if k.plan.escaping or v.plan.escaping:
        return None, None
    return served_numba.ServedAttention(k, v), served_writing_numba.ServedWriter(k, v)
