"""Norm, Hadamard rotation, nearest point of the E8 lattice."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvlab.core.codec_settings import Bits, Conditioned, Plugin


class E8Stream(Conditioned):
    """Norm, Hadamard rotation, nearest point of the E8 lattice in as many points as `bits` can index."""

    codec: Literal["e8"] = "e8"
    bits: Bits
    seed: int = Field(default=3405691582, ge=0)


CODEC = Plugin(E8Stream, "kvlab.codecs.e8.codec:E8Codec")
