"""The rounding of an engine's dtype in a codec's place: what a cell costs that only stores K and V shorter."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import Encoded, Place, Site, StreamCalibration, all_finite, block_index, checked
from kvlab.codecs.cast import CastStream
from kvlab.codecs.shared.apart import apart
from kvlab.core.errors import NonFinite


class CastCodec:
    """Every value rounded to the recipe's dtype, to nearest and ties to even, as torch does it.

    It is a control and no way to store a tensor, so `packed` is False: an engine of that dtype has these
    bytes anyway.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, recipe: CastStream, calibration: StreamCalibration | None = None):
        self.recipe = recipe

    @apart
    def encode(self, x: Tensor, site: Site) -> Encoded:
        """Round `x`; `NonFinite` when a value is beyond the dtype's largest."""
        x = checked(x, site)
        dtype = getattr(torch, self.recipe.dtype)
        values = x.to(dtype)
        if not all_finite(values):
            raise NonFinite(
                f"layer {site.layer} {site.stream}: a value of {x.abs().max().item():.4g} does not fit "
                f"{self.recipe.dtype}, which ends at {torch.finfo(dtype).max:.4g}, in window {site.window}; "
                "leave the layer uncoded",
                code="non-finite.too-large",
            )
        return Encoded(tuple(x.shape), site.layer, site.stream, shared=(), blocks=((values,),), packed=False)

    def decode(self, encoded: Encoded) -> Tensor:
        """The rounded tensor as float32."""
        return encoded.blocks[0][0].to(torch.float32)

    def decode_block(self, encoded: Encoded, index: int) -> tuple[Place, Tensor]:
        """See `Codec.decode_block`; there is one block only."""
        block_index(encoded, index)
        return (slice(None), slice(None)), self.decode(encoded)
