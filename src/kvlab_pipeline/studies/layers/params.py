"""The section `layers`: which layers are coded alone, and left out, on how many windows."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from kvlab.core.params import Params, Section, at_most, running
from kvlab.core.recipe import DType, Engine, Protocol, Stream


class Layers(Section):
    """Per-layer attribution: the codec on one layer at a time, and on all layers but one."""

    key = "layers"
    told = "each layer coded alone, and left out"
    takes = ("engines", "protocols", "windows")

    dtype: DType = Field(default="float32", description="what the engine computes in")
    engines: tuple[Engine, ...] = Field(
        default=("hf",),
        min_length=1,
        description="on which it is measured, as far as they run; where none does, on the first of the run",
    )
    left_out: bool = Field(default=True, description="each layer is left out too, of all of them")
    protocols: tuple[Protocol, ...] = Field(
        default=("in_forward", "snapshot"),
        min_length=1,
        description="under which they are measured, as far as they are of the run; where none is, all of the run",
    )
    streams: tuple[Stream, ...] = Field(
        default=("k", "v"), min_length=1, description="each is attributed apart; `kv`: K and V of a layer at once"
    )
    windows: int = Field(default=4, ge=2, description="scored windows; at most, and if not given cut to, windows.test")

    def fitted(self, params: Params) -> Layers:
        """Engines and protocols of the run, and as many windows as there are."""
        found = self.unsaid(windows=min(self.windows, params.windows.test))
        protocols = tuple(one for one in self.protocols if one in params.protocols) or params.protocols
        return found.model_copy(update={"engines": running(self.engines, params), "protocols": protocols})

    def problems(self, params: Params) -> Iterator[str]:
        """More windows than there are."""
        yield from at_most("layers.windows", self.windows, "windows.test", params.windows.test)
