"""Coders of what is no codec: they keep less of a context's K and V, in numbers of an engine's own kind."""

from __future__ import annotations

import torch

from kvlab.base.model import ModelInfo
from kvlab.base.recipe import Cell
from kvlab.base.records import Coding
from kvlab.lab.coding import CleanCapture, Coder


class KeepingCoder(Coder):
    """Keeps less, and counts every byte of it in its tally.

    Parameters
    ----------
    cell : Cell
        Of all layers and both streams, under `snapshot`; its recipe codes nothing.
    dtype : torch.dtype or None
        That numbers are kept in; None leaves them as they are.

    Attributes
    ----------
    made : dict of (layer, stream) to Tensor
        K and V of the last window's tokens, those that are left out too, as what is kept was made from.
    """

    def __init__(self, cell: Cell, dtype: torch.dtype | None):
        super().__init__(cell, None)
        self.dtype = dtype
        self.made: dict[tuple[int, str], torch.Tensor] = {}

    def warm_up(self, clean: CleanCapture, ids: list[int], window: int) -> None:
        """See `Coder`."""
        self.held(clean, ids, window)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """As it is kept."""
        return x if self.dtype is None else x.to(self.dtype)

    def coding(self, info: ModelInfo, tokens: int, dtype: str) -> Coding:
        """See `Coder`; the bytes are those of the tally, which are all that is kept."""
        self.refuse_idle()
        return Coding(
            fires=self.tally.fires,
            expected_fires=self.expected_fires(),
            values=self.cell.windows * tokens * info.values_per_token,
            coded_bytes=self.tally.coded_bytes,
            raw_bytes=0,
            d_eff={},
            outlier_rate={},
            whitened_error={},
        )
