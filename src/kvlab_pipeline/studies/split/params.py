"""The section `split`: how many bits K and V share, and how unevenly."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from kvlab.codecs.catalogue import Laddered, has_bits
from kvlab.core.codec_settings import MOST_BITS
from kvlab.core.params import Params, Section, at_most
from kvlab.core.recipe import Protocol


class Split(Section):
    """One codec at equal bytes, its bits divided between K and V in several ways."""

    key = "split"
    told = "bits divided between K and V"
    takes = ("protocols", "windows")

    codec: Laddered = Field(default="hadamard", description="that has bits to divide")
    total: int = Field(default=6, ge=2, le=2 * MOST_BITS, description="bits of K and V together, per pair of values")
    apart: int = Field(default=1, ge=0, lt=MOST_BITS, description="bits that K may have more, or fewer, than its half")
    protocol: Protocol = Field(default="snapshot", description="default: snapshot if it is among `protocols`")
    windows: int = Field(default=16, ge=2, description="scored windows; at most, and if not given cut to, windows.test")

    def fitted(self, params: Params) -> Split:
        """A protocol of the run, and as many windows as there are."""
        protocol = self.protocol if self.protocol in params.protocols else params.protocols[0]
        return self.unsaid(protocol=protocol, windows=min(self.windows, params.windows.test))

    def problems(self, params: Params) -> Iterator[str]:
        """A codec without bits, or more windows than there are."""
        if not has_bits(self.codec):
            yield f"split.codec is {self.codec!r}, which has no bits to divide"
        if self.total % 2 and not self.apart:
            yield f"split.total is {self.total}, an odd number, and split.apart is 0; set it to 1"
        yield from at_most("split.windows", self.windows, "windows.test", params.windows.test)
