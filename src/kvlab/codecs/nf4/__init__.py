"""NormalFloat of 4 bits, with a scale per group of channels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvlab.core.codec_settings import Conditioned, Plugin


class Nf4Stream(Conditioned):
    """NormalFloat of 4 bits, with a scale per `group` of neighbouring channels of one token."""

    codec: Literal["nf4"] = "nf4"
    group: int = Field(default=64, ge=2, le=65536)


CODEC = Plugin(Nf4Stream, "kvlab.codecs.nf4.codec:Nf4Codec")
