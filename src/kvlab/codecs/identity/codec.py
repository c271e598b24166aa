"""The stream as it is: the control of every measurement, and how layers that are left alone are stored."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import Encoded, Place, Site, StreamCalibration, block_index, checked, finite, stored
from kvlab.codecs.shared.apart import apart
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import StreamError


class IdentityCodec:
    """Stores the tensor unchanged, in its own dtype, as one block."""

    per_token: ClassVar[bool] = True

    def __init__(self, recipe: IdentityStream, calibration: StreamCalibration | None = None):
        self.recipe = recipe

    @apart
    def encode(self, x: Tensor, site: Site) -> Encoded:
        """A copy of `x`."""
        checked(x, site)
        values = x.detach().clone(memory_format=torch.contiguous_format)
        return Encoded(tuple(x.shape), site.layer, site.stream, shared=(), blocks=((values,),))

    def decode(self, encoded: Encoded) -> Tensor:
        """The copy as float32."""
        stored(encoded.shared)
        if len(encoded.blocks) != 1 or len(encoded.blocks[0]) != 1:
            raise StreamError("an uncoded tensor is one block of one array")
        values = encoded.blocks[0][0]
        if tuple(values.shape) != tuple(encoded.shape) or not values.dtype.is_floating_point:
            raise StreamError(f"an uncoded tensor of shape {list(encoded.shape)} is stored as {list(values.shape)}")
        return finite(values.to(torch.float32, copy=True), "an uncoded tensor")

    def decode_block(self, encoded: Encoded, index: int) -> tuple[Place, Tensor]:
        """See `Codec.decode_block`; there is one block only."""
        block_index(encoded, index)
        return (slice(None), slice(None)), self.decode(encoded)
