"""OSCAR: rotation by what queries and outputs weigh, Hadamard, clipping, group scales (arXiv 2605.17757)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_serializer

from kvlab.core.codec_settings import SILENT, Bits, Conditioned, Kind, Plugin, Published, Tensor, Values, without


class OscarStream(Conditioned):
    """OSCAR: eigenvectors of the query covariance, Hadamard, clipping, group scales.

    `follow` says whether V is rotated by its own second moment, or by that of what attention makes of it.
    """

    codec: Literal["oscar"] = "oscar"
    bits: Bits
    group: int = Field(default=64, ge=2, le=65536)
    clip: float = Field(default=0.96, gt=0, le=1)
    follow: Literal["values", "outputs"] = "values"

    @model_serializer(mode="wrap")
    def _said_besides(self, whole) -> Values:
        return without(whole(self), SILENT | {"weigh": False, "follow": "values"})


UNCLIPPED = 4  # bits from which the clipping, published for 2, costs more than it gains


def _clips(bits: float, v_bits: float) -> tuple[Values, Values]:
    """Of K and of V, where each is coded at few bits."""
    k, v = ({"clip": ratio if width < UNCLIPPED else 1.0} for ratio, width in ((0.96, bits), (0.92, v_bits)))
    return k, v


def _reads(stream: OscarStream, which: Tensor) -> tuple[Kind, ...]:
    """K is rotated by Sigma_q, V by its own covariance or by that of attention's outputs."""
    if which == "k":
        return ("whitener",)
    return ("outputs",) if stream.follow == "outputs" else ("components",)


def _paper(k: int, v: int, more: Values) -> Values:
    ends = {"group": 128, "sink": 64, "recent": 256}
    keys, values = (ends | clip | more for clip in _clips(k, v))
    values = {"follow": "outputs"} | values
    return {"k": OscarStream(bits=k, **keys), "v": OscarStream(bits=v, **values), "rotary": "after"}


CODEC = Plugin(
    OscarStream,
    "kvlab.codecs.oscar.codec:OscarCodec",
    _reads,
    own=_clips,
    published={
        "oscar-paper": Published(
            _paper,
            "Zhou et al. 2026, arXiv 2605.17757",
            "K after its rotary embedding; group 128; first 64 and last 256 tokens exact; clip .96 (K) and .92 (V)"
            " below 4 bits; V rotated by the second moment of attention's outputs",
        ),
    },
)
