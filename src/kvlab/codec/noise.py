"""White Gaussian noise in a codec's place: how sensitive is the model to an error of known size?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codec.base import Encoded, Site, Stats, StreamCalibration, checked, spread_sq, sum_sq
from kvlab.codec.seeding import generator
from kvlab.recipe import NoiseStream


@dataclass(frozen=True)
class Noised(Encoded):
    """The tensor with its noise; nothing is stored, so no bytes are counted."""

    packed: ClassVar[bool] = False

    values: Tensor

    def tensors(self) -> list[Tensor]:
        """None: noise is not a way to store a tensor."""
        return []


class NoiseCodec:
    """x + sigma * rms(x) * g with one rms per tensor and g white, of unit variance.

    g depends on the recipe's seed and on the site, not on sigma, so that two sigmas see the same
    noise and their difference is paired.
    """

    def __init__(self, recipe: NoiseStream, calibration: StreamCalibration | None = None):
        self.recipe = recipe

    @torch.no_grad()
    def encode(self, x: Tensor, site: Site) -> Noised:
        """Add the noise of this site."""
        x = checked(x, site)
        rms = x.double().square().mean().sqrt().item()
        source = generator("noise", self.recipe.seed, site.window, site.layer, site.stream)
        white = torch.randn(x.shape, generator=source, dtype=torch.float32).to(x.device)
        values = x + (self.recipe.sigma * rms) * white
        return Noised(stats=Stats(error_sq=sum_sq(values - x), signal_sq=spread_sq(x)), values=values)

    def decode(self, encoded: Noised) -> Tensor:
        """The noised tensor."""
        return encoded.values.clone()
