"""Round to nearest on an asymmetric grid per group of channels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvlab.core.codec_settings import Bits, Conditioned, Plugin


class IntStream(Conditioned):
    """Round to nearest on an asymmetric grid per `group` of neighbouring channels of one token."""

    codec: Literal["int"] = "int"
    bits: Bits
    group: int = Field(default=64, ge=2, le=65536)


CODEC = Plugin(IntStream, "kvlab.codecs.int.codec:IntCodec")
