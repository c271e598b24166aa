"""A codec's error turned in a random direction: what of the codec's cost is due to the size of its error alone?"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import Encoded, Place, Site, StreamCalibration, all_finite, block_index, checked
from kvlab.codecs.isotropic import IsotropicStream
from kvlab.codecs.registry import build
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import NonFinite


class IsotropicCodec:
    """x + |e| g / |g| with e the error of the codec `of` and g white, for every token of every head.

    The norms are plain Euclidean ones over head_dim, of K and V as they come: nothing is whitened. g depends
    on the recipe's seed and on the site, not on the codec, so that two codecs see the same directions and
    their difference is paired. This is no way to store a tensor: `packed` is False.

    Parameters
    ----------
    recipe : IsotropicStream
        Its `of` is the codec whose error is replaced.
    calibration : StreamCalibration or None
        What that codec needs.

    Raises
    ------
    CalibrationMismatch
        That codec asks for a fitted codebook that `calibration` does not hold.
    """

    per_token: ClassVar[bool] = False

    def __init__(self, recipe: IsotropicStream, calibration: StreamCalibration | None = None):
        self.recipe = recipe
        self.inner = build(recipe.of, calibration)

    @apart
    def encode(self, x: Tensor, site: Site) -> Encoded:
        """Add the noise of this site; the stats are those of the codec whose error it replaces."""
        x = checked(x, site)
        coded = self.inner.encode(x, site)
        wide = x.double()
        length = (self.inner.decode(coded).double() - wide).norm(dim=-1, keepdim=True)
        values = (wide + length * self._directions(x, site)).float()
        if not all_finite(values):
            raise NonFinite(
                f"layer {site.layer} {site.stream}: a value of {x.abs().max().item():.4g} with noise does not fit "
                f"float32 in window {site.window}; leave the layer uncoded",
                code="non-finite.too-large",
            )
        return Encoded(
            tuple(x.shape), site.layer, site.stream, shared=(), blocks=((values,),), stats=coded.stats, packed=False
        )

    def _directions(self, x: Tensor, site: Site) -> Tensor:
        """Unit vectors in uniformly random directions, float64 of the shape of `x`."""
        source = generator("isotropic", self.recipe.seed, site.window, site.layer, site.stream)
        white = torch.randn(x.shape, generator=source, dtype=torch.float32).to(x.device).double()
        return torch.nn.functional.normalize(white, dim=-1)

    def decode(self, encoded: Encoded) -> Tensor:
        """The noised tensor."""
        return encoded.blocks[0][0].clone()

    def decode_block(self, encoded: Encoded, index: int) -> tuple[Place, Tensor]:
        """See `Codec.decode_block`; there is one block only."""
        block_index(encoded, index)
        return (slice(None), slice(None)), self.decode(encoded)
