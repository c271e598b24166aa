"""The part `kvstore.bitplanes`: how many texts, positions, groups and budgets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from kvlab.core.params import Params, Section, at_most

Counted = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


class BitplanesStudy(Section):
    """How well a few bits of each key rank what attention looks at."""

    windows: int = Field(default=32, ge=2, description="texts; at most, and if not given cut to, windows.test")
    queries: int = Field(default=8, ge=1, description="positions of each text from which is looked back")
    groups: tuple[Counted, ...] = Field(default=(32, 128), min_length=1, description="numbers that share a scale")
    kept: tuple[Share, ...] = Field(
        default=(0.01, 0.02, 0.05, 0.1, 0.2), min_length=1, description="shares of the tokens that are kept"
    )
    chunk_tokens: int = Field(default=8, ge=1, description="tokens of a chunk, where whole chunks are kept")
    sinks: int = Field(default=4, ge=0, description="first tokens that are kept in any case, in the variant with such")
    recent: int = Field(default=14, ge=0, description="last tokens that are kept in any case, in the variant with such")

    def fitted(self, params: Params) -> BitplanesStudy:
        """As many texts as there are windows."""
        return self.unsaid(windows=min(self.windows, params.windows.test))

    def problems(self, params: Params) -> Iterator[str]:
        """More texts than there are windows."""
        yield from at_most("kvstore.bitplanes.windows", self.windows, "windows.test", params.windows.test)
