"""Each value rounded to a dtype of 16 bits: a control."""

from __future__ import annotations

from typing import Literal

from kvlab.core.codec_settings import Frozen, Plugin


class CastStream(Frozen):
    """Each value rounded to `dtype` and back: what an engine of that dtype does to K and V by itself."""

    codec: Literal["cast"] = "cast"
    dtype: Literal["bfloat16", "float16"] = "bfloat16"


CODEC = Plugin(CastStream, "kvlab.codecs.cast.codec:CastCodec", control=True, stores=False)
