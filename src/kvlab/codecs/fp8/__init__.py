"""Each value rounded to 8-bit floating point, with a scale per head and block."""

from __future__ import annotations

from typing import Literal

from kvlab.core.codec_settings import Conditioned, Plugin


class Fp8Stream(Conditioned):
    """Each value rounded to 8-bit floating point (4 exponent and 3 mantissa bits).

    There is one scale per head and block.
    """

    codec: Literal["fp8"] = "fp8"


CODEC = Plugin(Fp8Stream, "kvlab.codecs.fp8.codec:Fp8Codec")
