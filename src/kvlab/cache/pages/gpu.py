"""The pages of one layer in a GPU's memory: rows of `klt` of K after its rotary embedding, without escapes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.cache.pages.attention import Attended
from kvlab.cache.pages.exact import keep_exact
from kvlab.cache.pages.layer import LayerPages
from kvlab.cache.pages.rope import MeanByPosition
from kvlab.cache.pages.step import ExactStep
from kvlab.codecs.klt.rows import KltRows
from kvlab.codecs.klt.served_triton import CodedSpans, ServedLoops

STRIP = 16384  # tokens that are coded at once: bounds the memory


class GpuPages(LayerPages):
    """`LayerPages` that Triton's kernels write, and read where each sequence has one query.

    Parameters
    ----------
    layer : int
        Which one.
    k, v : KltRows
        How a token's K and V lie, with plans on the GPU.
    rotation : MeanByPosition
        What stands between K as attention sees it and as it is coded.

    Attributes
    ----------
    faults : Tensor
        int32 [1]; 1 once a component that has bits was not finite. Whoever has the pages looks: to ask is to wait.
    """

    on_gpu = True

    def __init__(self, layer: int, k: KltRows, v: KltRows, rotation: MeanByPosition):
        super().__init__(layer, k, v, rotation, loops=False)
        self.served = ServedLoops(k.plan, v.plan)
        self.faults = torch.zeros(1, dtype=torch.int32, device=k.plan.mean.device)

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
        """See `LayerPages.write`; a token that cannot be coded is noted in `faults`."""
        rows = self._rows(pages)
        for start in range(0, len(slots), STRIP):
            own = slice(start, start + STRIP)
            one, other = k[own].transpose(0, 1), v[own].transpose(0, 1)
            coded = self.rotation.undo(one, positions[own]), other.float()
            self.served.write(*coded, rows, slots[own], self.faults)
        if exact:
            keep_exact(k, v, store, exact, loops=False)
        self.written += len(slots)

    def attend_single(self, pages: Tensor, query: Tensor, span: CodedSpans, tokens: int, scale: float) -> Attended:
        """Attention of one query of each sequence [n, heads, head_dim] over the coded tokens of `span`, `tokens`."""
        self.read_back += tokens
        q = query.float() * scale
        return Attended(*self.served.attend(self._rows(pages), pages.shape[2], span, q, self.rotation.rotation.table))
