"""White Gaussian noise in a codec's place: how sensitive is the model to an error of known size?"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import Encoded, Place, Site, StreamCalibration, all_finite, block_index, checked
from kvlab.codecs.noise import NoiseStream
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import NonFinite


class NoiseCodec:
    """x + sigma * rms(x) * g with one rms per tensor and g white, of unit variance.

    g depends on the recipe's seed and on the site, not on sigma, so that two sigmas see the same
    noise and their difference is paired. Noise is no way to store a tensor: `packed` is False.
    """

    per_token: ClassVar[bool] = False

    def __init__(self, recipe: NoiseStream, calibration: StreamCalibration | None = None):
        self.recipe = recipe

    @apart
    def encode(self, x: Tensor, site: Site) -> Encoded:
        """Add the noise of this site; `NonFinite` also when the sum does not fit float32."""
        x = checked(x, site)
        rms = x.double().square().mean().sqrt().item()
        source = generator("noise", self.recipe.seed, site.window, site.layer, site.stream)
        white = torch.randn(x.shape, generator=source, dtype=torch.float32).to(x.device)
        values = x + (self.recipe.sigma * rms) * white
        if not all_finite(values):
            raise NonFinite(
                f"layer {site.layer} {site.stream}: a value of {x.abs().max().item():.4g} with noise does not fit "
                f"float32 in window {site.window}; use a smaller sigma, or leave the layer uncoded",
                code="non-finite.too-large",
            )
        return Encoded(tuple(x.shape), site.layer, site.stream, shared=(), blocks=((values,),), packed=False)

    def decode(self, encoded: Encoded) -> Tensor:
        """The noised tensor."""
        return encoded.blocks[0][0].clone()

    def decode_block(self, encoded: Encoded, index: int) -> tuple[Place, Tensor]:
        """See `Codec.decode_block`; there is one block only."""
        block_index(encoded, index)
        return (slice(None), slice(None)), self.decode(encoded)
