"""Gaussian noise where a codec would sit: a control."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvlab.core.codec_settings import Frozen, Plugin


class NoiseStream(Frozen):
    """Gaussian noise of `sigma` times the tensor's rms, added where a codec would sit."""

    codec: Literal["noise"] = "noise"
    sigma: float = Field(ge=0)
    seed: int = Field(ge=0)


CODEC = Plugin(NoiseStream, "kvlab.codecs.noise.codec:NoiseCodec", control=True, stores=False)
