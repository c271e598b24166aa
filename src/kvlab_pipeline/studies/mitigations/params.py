"""The section `mitigations`: what may be spent, and how it is judged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pydantic import Field

from kvlab.core.codec_settings import Bits
from kvlab.core.params import Params, Section, at_most
from kvlab.core.recipe import Protocol


class MitigationsSection(Section):
    """Where to spend bytes: chosen on the calibration split, judged on the test split at equal bytes."""

    key = "mitigations"
    told = "where to spend bytes"
    takes = ("protocols", "windows")

    protocols: tuple[Protocol, ...] = Field(
        default=("in_forward", "snapshot"),
        min_length=1,
        description="under which they are judged; default: those of the run",
    )
    windows: int = Field(default=32, ge=2, description="scored windows; at most, and if not given cut to, windows.test")
    budget: float = Field(
        default=10.0, gt=0, le=32, description="bits per value that boundary layers may bring the cache to"
    )
    uniform: tuple[tuple[Bits, Bits], ...] = Field(
        default=((3, 2), (4, 3), (6, 4), (8, 6), (8, 8)),
        min_length=2,
        description="bits and v_bits of the studied recipe: the curve that equal bytes are read from",
    )
    klt_bits: float = Field(default=4.0, gt=0, le=8, description="bits per value of the klt arms, of the whole cache")

    def fitted(self, params: Params) -> MitigationsSection:
        """The protocols of the run, and as many windows as there are."""
        return self.unsaid(protocols=params.protocols, windows=min(self.windows, params.windows.test))

    def problems(self, params: Params) -> Iterator[str]:
        """More windows than there are, and a curve whose points do not rise one after the other."""
        yield from at_most("mitigations.windows", self.windows, "windows.test", params.windows.test)
        for low, high in pairwise(self.uniform):
            if low == high or not rises(low, high):
                yield (
                    f"mitigations.uniform has {list(high)} after {list(low)};"
                    " allowed: points that rise, bits or v_bits or both, neither falling"
                )


def rises(low: tuple[int, int], high: tuple[int, int]) -> bool:
    """Whether neither of two bits is smaller in `high`."""
    return low[0] <= high[0] and low[1] <= high[1]
