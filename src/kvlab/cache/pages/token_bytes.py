"""A token of one layer as a row of bytes: what a page of vLLM's cache is made of.

A page is written a token at a time, by whoever is served in that step, and read by whoever shares it. So a token's
bytes are its own: as many for each token of a layer, and none of them says anything of another token. Codecs that code
every token by itself have such bytes. `klt`'s are those of a block of one token of its stream (`codecs.klt.planes`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvlab.codecs.base import Codec, Encoded, Site
from kvlab.codecs.klt.codec import STRIP, KltCodec
from kvlab.codecs.klt.joining import Strand, arrays_of, layout_of, refilled
from kvlab.codecs.klt.rows import KltRows
from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import CapabilityError

CPU = torch.device("cpu")
PROBE = (2, 3)  # tokens of the two pieces that a layout is found by


class Rows(Protocol):
    """K or V of one layer as rows.

    `bytes` is what a token takes, all heads together.
    """

    bytes: int

    def encode(self, x: Tensor) -> Tensor:
        """Tokens [heads, n, head_dim] as rows uint8 [n, bytes]; `NonFinite` where one holds NaN or infinity."""

    def decode(self, rows: Tensor) -> Tensor:
        """Rows uint8 [n, bytes] as tokens float32 [heads, n, head_dim]; `StreamError` where none of them can be."""


def rows_of(codec: Codec, site: Site, heads: int, head_dim: int, device: torch.device = CPU) -> Rows:
    """How the tokens of a site lie in pages on a device.

    Raises
    ------
    CapabilityError
        The codec codes tokens together, or does not give every token whole bytes of its own.
    CalibrationMismatch
        Its calibration does not fit the site.
    """
    if isinstance(codec, KltCodec):
        return KltRows(codec, site, heads, head_dim, device)
    return LaidOut(codec, site, heads, head_dim)


class LaidOut:
    """Rows of any codec that codes tokens one by one, cut out of its arrays.

    What is the same in every block, as a table would be, is held once, and is no part of a row.
    """

    def __init__(self, codec: Codec, site: Site, heads: int, head_dim: int):
        self.codec, self.site, self.most = codec, site, getattr(codec.recipe, "block_size", None) or STRIP
        x = torch.randn(
            heads, sum(PROBE), head_dim, generator=generator("rows", site.layer, site.stream), dtype=torch.float32
        )
        whole, first, rest = [codec.encode(part, site) for part in (x, *x.split(PROBE, dim=1))]
        layout = layout_of(whole, first, rest) if codec.per_token and len(whole.blocks) == 1 else None
        if layout is None:
            raise CapabilityError(
                f"codec {codec.recipe.codec!r} does not give each token of layer {site.layer} ({heads} heads of"
                f" {head_dim}) whole bytes of its own, so no page can hold it; give klt, or another number of bits",
                code="capability.no-rows",
            )
        self.like = whole
        self.parts = [
            (part, self._tokenwise(part, array).shape[1:] if isinstance(part, Strand) else None, array.dtype)
            for part, array in zip(layout.parts, arrays_of(whole), strict=True)
        ]
        self.bytes = self._rows(whole).shape[1]

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """See `Rows`."""
        return torch.cat([self._rows(self.codec.encode(part, self.site)) for part in x.split(self.most, dim=1)])

    @torch.no_grad()
    def decode(self, rows: Tensor) -> Tensor:
        """See `Rows`."""
        return torch.cat([self.codec.decode(self._encoded(part)) for part in rows.split(self.most)], dim=1)

    @staticmethod
    def _tokenwise(strand: Strand, array: Tensor) -> Tensor:
        """The array with its tokens as the first axis."""
        return array.unflatten(strand.axis, (strand.lead, -1, strand.step)).movedim(strand.axis + 1, 0)

    def _rows(self, encoded: Encoded) -> Tensor:
        """The bytes of each token of a block [n, bytes]."""
        return torch.cat(
            [
                self._tokenwise(part, array).flatten(1).contiguous().view(torch.uint8)
                for (part, shape, _), array in zip(self.parts, arrays_of(encoded), strict=True)
                if shape is not None
            ],
            dim=1,
        )

    def _encoded(self, rows: Tensor) -> Encoded:
        """The block that `_rows` took apart."""
        start, arrays = 0, []
        for part, shape, dtype in self.parts:
            if shape is None:
                arrays.append(part)
                continue
            size = shape.numel() * dtype.itemsize
            own = rows[:, start : start + size].clone(memory_format=torch.contiguous_format).view(dtype)
            tokens_inside = own.unflatten(1, shape).movedim(0, part.axis + 1)
            arrays.append(tokens_inside.flatten(part.axis, part.axis + 2))
            start += size
        heads, _, head_dim = self.like.shape
        return replace(refilled(self.like, arrays), shape=(heads, len(rows), head_dim))
