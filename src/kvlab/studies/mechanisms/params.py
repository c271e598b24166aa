"""The section `mechanisms`: what the gate judges, and on how many retrieval items."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvlab.base.params import Params, Section
from kvlab.base.recipe import Bits, DType, Protocol
from kvlab.base.rungs import LADDERED, Laddered


class Mechanisms(Section):
    """What the gate judges: codecs and an engine's own cache dtypes, each with its quality, bytes and throughput."""

    key = "mechanisms"
    told = "rows for the gate"
    takes = ("protocols",)

    dtype: DType = Field(default="bfloat16", description="what the engines compute in")
    protocol: Protocol = Field(
        default="snapshot",
        description="of the codecs (an engine's own cache stores inside the forward); default: snapshot if it is"
        " among `protocols`",
    )
    codecs: tuple[Laddered, ...] = Field(default=LADDERED, min_length=1, description="each on every engine of the run")
    bits: tuple[Bits, ...] = Field(default=(2, 4), min_length=1, description="of both streams; some codecs have none")
    cache_dtypes: tuple[Literal["fp8_e4m3", "fp8_e5m2"], ...] = Field(
        default=("fp8_e4m3", "fp8_e5m2"),
        description="that vLLM's own cache is told to store, on a CPU with AVX-512; none: leave them out",
    )
    needles: int = Field(default=200, ge=2, description="retrieval items, each with a text of its own")
    claim: Literal["supported", "reviewed_preview", "gated", "artifact_only", "unsupported"] = Field(
        default="supported", description="tier that every row claims; the gate says which one it earns"
    )

    def fitted(self, params: Params) -> Mechanisms:
        """A protocol of the run."""
        return self.unsaid(protocol=self.protocol if self.protocol in params.protocols else params.protocols[0])
