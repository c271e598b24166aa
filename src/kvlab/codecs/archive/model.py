"""A fitted `archive` codec: what is predicted from what, and everything that encoder and decoder read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvlab.codecs.archive.layer import StreamModel
from kvlab.codecs.archive.steps import OCTAVE

STREAMS = ("k", "v")
SPECTRA = range(6 * OCTAVE, 21 * OCTAVE, OCTAVE)  # qualities whose spectra are stored
SEEN = range(9 * OCTAVE, 16 * OCTAVE, 2 * OCTAVE)  # those that indices were counted at


def sources_of(layer: int, stream: str) -> list[tuple[int, str]]:
    """What a layer's K or V is predicted from: K and V of the layer below, and V from K of its own layer too."""
    below = [(layer - 1, "k"), (layer - 1, "v")] if layer else []
    return below + ([(layer, "k")] if stream == "v" else [])


@dataclass(frozen=True)
class ArchiveModel:
    """A fitted archive codec.

    Parameters
    ----------
    streams : dict of (int, str) to StreamModel
        By layer and stream.
    exponents : Tensor
        How often each exponent was seen, int32 [layers, EXPONENTS].
    counts : Tensor
        How often each magnitude was seen, by stream and class, int32 [2, CLASSES, LARGEST + 1].
    points : Tensor
        Reconstruction points, int16 [2, CLASSES, POINTS]; see `layer.LayerCoder`.
    rates : Tensor
        Bits of a value of the sample at every quality of `SEEN`, float32.
    by_tokens : Tensor
        Whether the first layer is taken from the token ids, bool [1].
    """

    streams: dict[tuple[int, str], StreamModel]
    exponents: Tensor
    counts: Tensor
    points: Tensor
    rates: Tensor
    by_tokens: Tensor

    def quality_for(self, bits: float) -> int:
        """About the quality at which a value takes so many bits."""
        return round(float(np.interp(bits, self.rates.tolist(), list(SEEN))))

    @property
    def layers(self) -> int:
        """Of the model."""
        return len(self.exponents)


def spectrum_at(fitted: StreamModel, quality: int) -> Tensor:
    """log2 of the deviations in 64ths at a quality between those that were stored, int32 [width]."""
    place, part = divmod(min(max(quality, SPECTRA.start), SPECTRA[-1]) - SPECTRA.start, OCTAVE)
    low, high = (fitted.spectrum[min(p, len(SPECTRA) - 1)].int() for p in (place, place + 1))
    return low + ((high - low) * part).div(OCTAVE, rounding_mode="floor")
