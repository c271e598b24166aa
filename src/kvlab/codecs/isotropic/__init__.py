"""White noise of the size of a codec's error, in its place: a control."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvlab.codecs.block import BlockStream
from kvlab.codecs.klt import KltStream
from kvlab.core.codec_settings import Frozen, Plugin


class IsotropicStream(Frozen):
    """A codec's error replaced by white Gaussian noise of the same norm, token by token and head by head.

    What the codec's error costs beyond this is due to its direction, not to its size.
    """

    codec: Literal["isotropic"] = "isotropic"
    of: Annotated[BlockStream | KltStream, Field(discriminator="codec")]
    seed: int = Field(ge=0)


CODEC = Plugin(IsotropicStream, "kvlab.codecs.isotropic.codec:IsotropicCodec", control=True, stores=False)
