"""The section `noise`: Gaussian noise in a codec's place, by stream, layer group and size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kvlab.core.params import Params, Section, at_most, running
from kvlab.core.recipe import DType, Engine, Protocol, Stream

Sigma = Annotated[float, Field(ge=0)]
LayerGroup = Literal["all", "coded", "boundary"]


class Noise(Section):
    """Gaussian noise on K or V in place of a codec."""

    key = "noise"
    told = "noise in a codec's place"
    takes = ("engines", "windows", "baseline")

    dtype: DType = Field(default="float32", description="what the engine computes in")
    engines: tuple[Engine, ...] = Field(
        default=("hf",),
        min_length=1,
        description="on which it is measured, as far as they run; where none does, on the first of the run",
    )
    protocol: Protocol = Field(
        default="in_forward",
        description="where it is added: as K and V are computed, or, in a fifth of the time, to the finished cache",
    )
    streams: tuple[Stream, ...] = Field(default=("k", "v"), min_length=1, description="what the noise is added to")
    sigmas: tuple[Sigma, ...] = Field(
        default=(0.001, 0.01, 0.03, 0.1, 0.3, 1.0), min_length=2, description="times the rms of the tensor"
    )
    groups: tuple[LayerGroup, ...] = Field(
        default=("all", "coded", "boundary"),
        min_length=1,
        description="of layers; `coded`: all but the boundary layers",
    )
    windows: int = Field(
        default=4,
        ge=2,
        description="scored windows; at most, and if not given cut to, those of `baseline`",
    )
    seed: int = Field(default=12345, ge=0, description="draws the noise")

    def fitted(self, params: Params) -> Noise:
        """Engines that run, and as many windows as there are."""
        found = self.unsaid(windows=min(self.windows, params.windows.test, params.baseline.windows))
        return found.model_copy(update={"engines": running(self.engines, params)})

    def problems(self, params: Params) -> Iterator[str]:
        """More windows than there are, or than those on which the engines' own rounding is known."""
        yield from at_most("noise.windows", self.windows, "windows.test", params.windows.test)
        if params.baseline.windows < self.windows <= params.windows.test:
            yield from at_most("noise.windows", self.windows, "baseline.windows", params.baseline.windows)
