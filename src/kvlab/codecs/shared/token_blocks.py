"""Codecs whose blocks are runs of tokens of all heads; each of them says only how one block is coded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import (
    Arrays,
    Encoded,
    Place,
    Site,
    Stats,
    StreamCalibration,
    block_index,
    checked,
    fitting,
    stored,
    uncalibrated,
)
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.front import Front, OwnFront
from kvlab.core.codec_settings import Conditioned
from kvlab.core.errors import CalibrationMismatch, StreamError


class TokenBlockCodec(ABC):
    """Cuts [heads, tokens, head_dim] into blocks of `recipe.block_size` tokens, the last one ragged.

    Parameters
    ----------
    recipe : Conditioned
        Settings; `center` and `whiten` are applied here.
    calibration : StreamCalibration or None
        What the recipe asks for.
    """

    per_token: ClassVar[bool] = False

    def __init__(self, recipe: Conditioned, calibration: StreamCalibration | None = None):
        self.recipe, self.calibration = recipe, calibration or StreamCalibration()
        self.front = self.make_front()

    def make_front(self) -> Front | OwnFront:
        """What stands before the codec: mean removal and metric, as the recipe asks."""
        return Front(self.recipe, self.calibration)

    @abstractmethod
    def pack(self, rows: Tensor, layer: int) -> tuple[Arrays, Stats]:
        """The arrays that store one block, float32 [heads, n, head_dim] in the codec's domain."""

    @abstractmethod
    def unpack(self, arrays: Arrays, shape: tuple[int, int, int], layer: int) -> Tensor:
        """One block of `shape` read from its arrays; `StreamError` when they are not what `pack` makes."""

    @apart
    def encode(self, x: Tensor, site: Site) -> Encoded:
        """See `Codec.encode`."""
        rows = fitting(self.front.forward(checked(x, site), site.layer), site)
        packed = [self.pack(block, site.layer) for block in rows.split(self.recipe.block_size, dim=1)]
        return Encoded(
            shape=tuple(x.shape),
            layer=site.layer,
            stream=site.stream,
            shared=(),
            blocks=tuple(arrays for arrays, _ in packed),
            stats=sum((stats for _, stats in packed), Stats()),
        )

    @apart
    def decode(self, encoded: Encoded) -> Tensor:
        """See `Codec.decode`."""
        # block by block to the end: a matrix product rounds a few rows alone otherwise than among many
        return torch.cat([self.decode_block(encoded, i)[1] for i in range(len(self.spans(encoded)))], dim=1)

    @apart
    def decode_block(self, encoded: Encoded, index: int) -> tuple[Place, Tensor]:
        """See `Codec.decode_block`."""
        span = self.spans(encoded)[block_index(encoded, index)]
        try:
            self.front.fits(encoded.shape, encoded.layer)
            return (slice(None), span), self.front.inverse(self._rows(encoded, index, span), encoded.layer)
        except CalibrationMismatch as error:
            raise uncalibrated(encoded, error) from None

    def spans(self, encoded: Encoded) -> list[slice]:
        """Tokens of each block; `StreamError` when there are more or fewer blocks than the shape needs."""
        stored(encoded.shared)
        tokens, size = encoded.shape[1], self.recipe.block_size
        if tokens < 1 or len(encoded.blocks) != -(-tokens // size):
            raise StreamError(f"{len(encoded.blocks)} blocks of {size} tokens cannot hold {tokens} tokens")
        return [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]

    def _rows(self, encoded: Encoded, index: int, span: slice) -> Tensor:
        heads, _, head_dim = encoded.shape
        return self.unpack(encoded.blocks[index], (heads, span.stop - span.start, head_dim), encoded.layer)
