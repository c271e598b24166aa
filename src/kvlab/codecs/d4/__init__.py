"""Norm, Hadamard rotation, nearest point of the D4 lattice."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvlab.core.codec_settings import Bits, Conditioned, Plugin


class D4Stream(Conditioned):
    """Norm, Hadamard rotation, nearest point of the D4 lattice in as many points as `bits` can index."""

    codec: Literal["d4"] = "d4"
    bits: Bits
    seed: int = Field(default=3405691582, ge=0)


CODEC = Plugin(D4Stream, "kvlab.codecs.d4.codec:D4Codec")
