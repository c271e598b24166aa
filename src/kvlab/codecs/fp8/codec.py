"""8-bit floating point, the compressed cache that engines ship: e4m3 with one scale per head."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.codecs.base import Arrays, Stats, finite, stored
from kvlab.codecs.shared.token_blocks import TokenBlockCodec

LARGEST = 448.0  # of e4m3fn (Micikevicius et al. 2022, arXiv 2209.05433), which has NaN but no infinity


class Fp8Codec(TokenBlockCodec):
    """Each value over its head's scale, rounded to e4m3; the scale maps the block's largest value to 448."""

    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """Codes as bytes [heads, n, head_dim] and scales float32 [heads]."""
        scale = rows.abs().amax(dim=(1, 2)) / LARGEST
        divisor = torch.where(scale > 0, scale, 1)[:, None, None]
        values = (rows / divisor).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return (values.view(torch.uint8), scale), Stats(n_coefficients=rows.numel())

    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """The codes' values, scaled."""
        codes, scale = stored(arrays, (torch.uint8, shape), (torch.float32, (shape[0],)))
        return finite(codes.view(torch.float8_e4m3fn).float() * scale[:, None, None], "a block of 8-bit floats")
