"""The stream as it is: the control of every measurement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codec.base import Encoded, Site, Stats, StreamCalibration, checked, spread_sq
from kvlab.recipe import IdentityStream


@dataclass(frozen=True)
class RawTensor(Encoded):
    """The tensor in the dtype it came in."""

    values: Tensor


class IdentityCodec:
    """Stores the tensor unchanged, in its own dtype."""

    def __init__(self, recipe: IdentityStream, calibration: StreamCalibration | None = None):
        self.recipe = recipe

    @torch.no_grad()
    def encode(self, x: Tensor, site: Site) -> RawTensor:
        """A copy of `x`."""
        stats = Stats(signal_sq=spread_sq(checked(x, site)))
        return RawTensor(stats=stats, values=x.detach().clone())

    def decode(self, encoded: RawTensor) -> Tensor:
        """The copy as float32."""
        return encoded.values.to(torch.float32, copy=True)
