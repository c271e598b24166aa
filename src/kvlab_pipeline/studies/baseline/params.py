"""The section `baseline`: what is measured with the codec off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from kvlab.core.params import Params, Section, at_most
from kvlab.core.recipe import DType


class Baseline(Section):
    """Codec off: each engine, dtype and attention implementation against the fp32 truth."""

    key = "baseline"
    told = "codec off"
    takes = ("windows",)

    hf_attention: tuple[Literal["eager", "sdpa"], ...] = Field(
        default=("sdpa", "eager"), min_length=1, description="attention implementations of hf"
    )
    dtypes: tuple[DType, ...] = Field(
        default=("float32", "bfloat16"), min_length=1, description="what the engines compute in; float32 among them"
    )

    windows: int = Field(
        default=4,
        ge=2,
        description="scored windows of these comparisons; at most, and if not given cut to, windows.test",
    )
    reruns: int = Field(
        default=4,
        ge=2,
        description="scored windows that each engine runs a second time, plain; at most, and if not given cut to,"
        " `windows`",
    )

    jitters: int = Field(
        default=0,
        ge=0,
        description="further rounding errors of each of these windows, on both engines, over which the codec's own KL"
        " is averaged before the engines are compared; each is a pass of either engine under each protocol",
    )

    def fitted(self, params: Params) -> Baseline:
        """As many windows as there are."""
        found = self.unsaid(windows=min(self.windows, params.windows.test))
        return found.unsaid(reruns=min(found.reruns, found.windows))

    def problems(self, params: Params) -> Iterator[str]:
        """More windows than there are, and no dtype in which the engines could agree."""
        yield from at_most("baseline.windows", self.windows, "windows.test", params.windows.test)
        yield from at_most("baseline.reruns", self.reruns, "baseline.windows", self.windows)
        if "float32" not in self.dtypes:
            yield (
                f"baseline.dtypes is {', '.join(self.dtypes)}; it must contain 'float32', which carries the agreement"
                " of the engines"
            )
