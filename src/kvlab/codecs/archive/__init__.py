"""The codec to keep a cache with: layers predicted from those below, entropy coded; whole caches."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_serializer, model_validator

from kvlab.core.codec_settings import Frozen, Plugin, without


class ArchiveStream(Frozen):
    """The codec to keep a cache with: layers predicted from those below, entropy coded; K and V of all layers at once.

    One of the two is asked for: `bits`, which the stored cache takes per value, everything included, within 1 %; or
    `quality`, in 64ths of an octave, of which each octave halves every step. `block_size` tokens decode alone.
    """

    codec: Literal["archive"] = "archive"
    bits: float | None = Field(default=None, gt=0, le=16)
    quality: int | None = Field(default=None, ge=128, lt=1600)
    block_size: int = Field(default=128, ge=1, le=65535)

    @model_validator(mode="after")
    def _asked_for_one(self):
        if (self.bits is None) == (self.quality is None):
            raise ValueError("archive takes bits or quality, one of them")
        return self

    @model_serializer(mode="wrap")
    def _said(self, whole) -> dict[str, Any]:
        return without(whole(self), {"bits": None, "quality": None})


CODEC = Plugin(
    ArchiveStream, "kvlab.codecs.archive.codec:ArchiveCodec", lambda stream, which: ("archive",), scope="cache"
)
