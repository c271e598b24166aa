"""The calibrated transform codec: KLT in the metric of the scores, bits by reverse water-filling."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_serializer

from kvlab.core.codec_settings import SILENT, Ends, Kind, Plugin, Tensor, Values, without

WHOLE_KLT = {"transform": "klt", "tables": "fitted", "allocation": "water_filling"}
"""Settings that take nothing out."""


class KltStream(Ends):
    """The calibrated transform codec: KLT in the metric of the scores, bits by reverse water-filling.

    `bits` is what a full block of `block_size` tokens may take per value, everything stored included; where `budget` is
    that of K and V of a layer, of one stream of all layers or of the whole cache, on the average over these, each
    getting what lowers the calibrated loss most.
    With `escape` a component that falls so far out of its table that storing it apart is the better
    bargain is stored apart, and a vector that is too large for its tables is coded at a scale.
    The rest take a part out (`codecs.klt.codec`); what takes nothing out is not said, so that ids stay.
    """

    codec: Literal["klt"] = "klt"
    bits: float = Field(gt=0, le=8)
    block_size: int = Field(default=512, ge=1, le=65536)
    escape: bool = True
    budget: Literal["tensor", "layer", "stream", "cache"] = "tensor"
    transform: Literal["klt", "per_head", "unweighted", "none"] = "klt"
    tables: Literal["fitted", "gaussian"] = "fitted"
    allocation: Literal["water_filling", "even"] = "water_filling"

    @model_serializer(mode="wrap")
    def _said(self, whole) -> dict[str, Any]:
        return without(whole(self), SILENT | WHOLE_KLT)


def _own(bits: float | None, v_bits: float | None) -> tuple[Values, Values]:
    """What K and V of all layers lose is weighed alike, unless somebody said what each shall have."""
    budget = {"budget": "cache" if bits == v_bits else "stream"}
    return budget, budget


def _reads(stream: KltStream, which: Tensor) -> tuple[Kind, ...]:
    """Spectra of all layers too, where bits go to those that need them."""
    return ("components",) if stream.budget == "tensor" else ("components", "spectra")


CODEC = Plugin(KltStream, "kvlab.codecs.klt.codec:KltCodec", _reads, own=_own)
