"""Norm, randomised Walsh-Hadamard rotation, Gaussian Lloyd-Max table: the TurboQuant family."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvlab.core.codec_settings import Bits, Conditioned, Plugin


class HadamardStream(Conditioned):
    """Norm, randomised Walsh-Hadamard rotation, Gaussian Lloyd-Max table: the TurboQuant family."""

    codec: Literal["hadamard"] = "hadamard"
    bits: Bits
    seed: int = Field(default=3405691582, ge=0)


CODEC = Plugin(HadamardStream, "kvlab.codecs.hadamard.codec:HadamardCodec")
