"""A token of one layer as a row of bytes: the planes of a block of one token, escape bits included."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.base import Site
from kvlab.codecs.klt.codec import STRIP, KltCodec

CPU = torch.device("cpu")


class KltRows:
    """K or V of one layer as rows; `bytes` is what a token takes, all heads together."""

    def __init__(self, codec: KltCodec, site: Site, heads: int, head_dim: int, device: torch.device = CPU):
        self.site = site
        self.plan = codec.plan(site.layer, (heads, 1, head_dim), device)
        self.bytes = self.plan.planes.bytes(1)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Tokens [heads, n, head_dim] as rows uint8 [n, bytes]; `NonFinite` where one holds NaN or infinity."""
        packed = []
        for part in x.float().split(STRIP, dim=1):
            symbols, _ = self.plan.analyse(part, self.site)
            packed.append(self.plan.planes.pack(symbols.T[..., None].contiguous()))
        return torch.cat(packed)

    @torch.no_grad()
    def decode(self, rows: Tensor) -> Tensor:
        """Rows uint8 [n, bytes] as tokens float32 [heads, n, head_dim]; `StreamError` where none of them can be."""
        symbols = self.plan.planes.unpack(rows, 1)[..., 0]
        return self.plan.synthesise(symbols.T.contiguous())
