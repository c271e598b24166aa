"""The section `noise`: Gaussian noise in a codec's place, by stream, layer group and size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kvlab.base.params import Params, Section, at_most
from kvlab.base.recipe import DType, Engine, Stream

Sigma = Annotated[float, Field(ge=0)]
LayerGroup = Literal["all", "coded", "boundary"]


class Noise(Section):
    """Gaussian noise on K or V in place of a codec."""

    key = "noise"
    told = "noise in a codec's place"
    takes = ("windows",)

    dtype: DType = Field(default="float32", description="what the engine computes in")
    engines: tuple[Engine, ...] | None = Field(
        default=None, min_length=1, description="on which it is measured; null: those of the run"
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
    windows: int = Field(default=16, ge=2, description="scored windows; at most, and if not given cut to, windows.test")
    seed: int = Field(default=12345, ge=0, description="draws the noise")

    def fitted(self, params: Params) -> Noise:
        """As many windows as there are."""
        return self.unsaid(windows=min(self.windows, params.windows.test))

    def problems(self, params: Params) -> Iterator[str]:
        """More windows than there are."""
        yield from at_most("noise.windows", self.windows, "windows.test", params.windows.test)

    def on(self, engines: tuple[Engine, ...]) -> tuple[Engine, ...]:
        """Those of the run's engines on which this is measured."""
        return tuple(engine for engine in engines if self.engines is None or engine in self.engines)
