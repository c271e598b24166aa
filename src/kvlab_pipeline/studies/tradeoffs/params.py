"""The section `tradeoffs`: which mechanisms are held against codecs, at which bytes, and on how much text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from kvlab.attention.named import EVICTIONS, Eviction, Latent, mechanism
from kvlab.codecs.catalogue import Laddered
from kvlab.core.codec_settings import Bits
from kvlab.core.errors import UserError
from kvlab.core.params import Params, Section, at_most

Budget = Annotated[float, Field(gt=0, le=16)]
Policy = Literal[EVICTIONS]
Uncalibrated = Literal["hadamard", "int", "kivi", "nf4"]


def _sparse(name: str) -> str:
    try:
        if isinstance(mechanism(name), Latent | Eviction):
            raise ValueError(f"{name!r} stores less and reads all of it; allowed: patterns of attention")
    except UserError as problem:
        raise ValueError(str(problem)) from None
    return name


Sparse = Annotated[str, AfterValidator(_sparse)]


class Tradeoffs(Section):
    """Codecs beside evictions, latent caches, sparse reading, their combinations, and self-speculation."""

    key = "tradeoffs"
    told = "what else makes a cache cheaper, at equal bytes"
    takes = ("windows", "mechanisms")

    windows: int = Field(
        default=16, ge=2, description="of `corpus.other`; at most, and if not given cut to, what it has"
    )
    codecs: tuple[Laddered, ...] = Field(
        default=("klt", "hadamard", "kivi"), min_length=1, description="with bits to choose; the first leads the tables"
    )
    bits: tuple[Bits, ...] = Field(default=(2, 3, 4), min_length=1, description="of K and of V, of the first codec")
    rival_bits: tuple[Bits, ...] = Field(default=(2, 4), min_length=1, description="the same of the others")
    budgets: tuple[Budget, ...] = Field(
        default=(2.5, 4.5), min_length=1, description="bits per value of the whole context, for evictions and latents"
    )
    policies: tuple[Policy, ...] = Field(default=("sinks", "attention"), description="of evictions")
    sinks: int = Field(default=4, ge=0, description="first tokens that evictions keep, and that latents store whole")
    recent: int = Field(
        default=32,
        ge=1,
        le=64,
        description="last tokens that evictions by scores keep, whose queries score; if not given, at most the context",
    )
    sparse: tuple[Sparse, ...] = Field(
        default=("block_sparse:block=16,top_k=6,window=64", "chunk_summary:chunk=16,top_k=12,exact=4"),
        description="patterns of attention, as `kvlab measure --mechanism` takes them",
    )
    combined: tuple[Bits, ...] = Field(
        default=(4,), description="bits of the first codec under the first pattern, of `latent_codec` and of `drafters`"
    )
    latent_codec: Uncalibrated = Field(default="hadamard", description="codes latents; it needs no calibration")
    latent_share: float = Field(
        default=2 / 3, gt=0, le=1, description="rank of coded latents, as a share of the K and V numbers of a layer"
    )
    needles: int = Field(default=12, ge=2, description="retrieval items, each with a text of its own")
    drafters: tuple[Laddered, ...] = Field(default=("klt",), description="codecs that draft for the exact cache")
    prompts: int = Field(
        default=3, ge=2, description="windows after whose context tokens are drafted; at most `windows`"
    )
    tokens: int = Field(default=24, ge=2, description="written greedily after each")
    draft: int = Field(default=4, ge=1, description="tokens of a draft, at most")
    steps: int = Field(default=12, ge=3, description="single tokens that are timed; the median counts")

    def fitted(self, params: Params) -> Tradeoffs:
        """As many windows as there are, and of their context no more than it has."""
        recent, sinks = min(self.recent, params.windows.context), min(self.sinks, params.windows.context - 1)
        found = self.unsaid(windows=min(self.windows, params.windows.other), recent=recent, sinks=sinks)
        return found.unsaid(prompts=min(found.prompts, found.windows))

    def problems(self, params: Params) -> Iterator[str]:
        """More windows than there are, or last tokens than a context has."""
        yield from at_most("tradeoffs.windows", self.windows, "windows.other", params.windows.other)
        yield from at_most("tradeoffs.prompts", self.prompts, "tradeoffs.windows", self.windows)
        yield from at_most("tradeoffs.recent", self.recent, "windows.context", params.windows.context)
        yield from at_most("tradeoffs.sinks", self.sinks, "one less than windows.context", params.windows.context - 1)
