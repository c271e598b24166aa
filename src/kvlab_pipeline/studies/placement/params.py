"""The part `kvstore.placement`: how many texts, and in how many orders their blocks lie."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from kvlab.core.params import Params, Section, at_most


class PlacementStudy(Section):
    """Whether it matters in which block a chunk lies."""

    chunk_tokens: int = Field(default=16, ge=1, description="tokens of a chunk")
    windows: int = Field(default=4, ge=1, description="texts; at most, and if not given cut to, windows.test")
    orders: int = Field(default=100, ge=2, description="random orders of the blocks, shared out among the texts")
    decode: int = Field(default=16, ge=1, description="tokens decoded after each")

    def fitted(self, params: Params) -> PlacementStudy:
        """As many texts as there are windows."""
        return self.unsaid(windows=min(self.windows, params.windows.test))

    def problems(self, params: Params) -> Iterator[str]:
        """More texts than there are windows."""
        yield from at_most("kvstore.placement.windows", self.windows, "windows.test", params.windows.test)
