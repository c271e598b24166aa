"""The section `mechanisms`: what the gate judges, and on how many retrieval items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kvlab.attention.named import EVICTIONS, mechanism
from kvlab.codecs.catalogue import KEPT_WHOLE, LADDERED, Finished, Laddered
from kvlab.core.codec_settings import Bits
from kvlab.core.errors import UserError, suggestion
from kvlab.core.params import Params, Section
from kvlab.core.recipe import PAGES_EXACT, DType, Protocol

PATTERNED = ("block_sparse", "window", "chunk_summary")  # kinds of `patterns`
KEPT = ("latent", *EVICTIONS)  # kinds of `kept`


class Mechanisms(Section):
    """What the gate judges: codecs and an engine's own cache dtypes, each with its quality, bytes and throughput."""

    key = "mechanisms"
    told = "rows for the gate"
    takes = ("protocols",)

    dtype: DType = Field(default="bfloat16", description="what the engines compute in")
    protocols: tuple[Protocol, ...] = Field(
        default=("in_forward", "snapshot"),
        min_length=1,
        description="of the codecs, a row of each under each (an engine's own cache stores inside the forward);"
        " default: those of the run",
    )
    codecs: tuple[Finished, ...] = Field(
        default=(*LADDERED, "archive"),
        description="of finished caches, on the first engine of the run; none: leave them out",
    )
    in_forward: tuple[Laddered, ...] = Field(
        default=LADDERED,
        description="those of them that are measured under `in_forward` too, on engines without rows of `caches`: a"
        " pass of each for every window",
    )
    bits: tuple[Bits, ...] = Field(default=(2, 4), min_length=1, description="of both streams; some codecs have none")
    whole_bits: tuple[Bits, ...] = Field(
        default=(2,),
        min_length=1,
        description="of codecs of whole caches, such as `archive`, which have rows under `snapshot` alone",
    )
    cache_dtypes: tuple[Literal["fp8_e4m3", "fp8_e5m2"], ...] = Field(
        default=("fp8_e4m3", "fp8_e5m2"),
        description="that vLLM's own cache is told to store, on a CPU with AVX-512; none: leave them out",
    )
    pages: tuple[Literal["klt", "hadamard"], ...] = Field(
        default=(),
        description="codecs whose bytes vLLM's own cache holds, at each of `bits`, on a CPU: the backend that"
        " `vllm serve` runs with KVLAB_PAGES; none: leave them out",
    )
    pages_rotary: Literal["before", "after"] = Field(
        default="after",
        description="where `pages` code K: before its rotary embedding (less is lost), or after it (it is quicker)",
    )
    pages_sink: int = Field(
        default=4, ge=0, le=PAGES_EXACT["sink"], description="first tokens of a request that `pages` read exact"
    )
    pages_recent: int = Field(
        default=128, ge=0, le=PAGES_EXACT["recent"], description="newest tokens of a request that `pages` read exact"
    )
    caches: tuple[Laddered, ...] = Field(
        default=(),
        description="codecs in `kvlab.Cache` as transformers' `generate` uses it, at each of `cached_bits`, on hf: the"
        " context in one call, then token after token; none: leave them out",
    )
    cached_bits: tuple[Bits, ...] = Field(
        default=(2, 4), min_length=1, description="of both streams of `caches`; default: `bits`"
    )
    cached_tokens: int = Field(default=16, ge=2, description="tokens after each window's context that `caches` score")
    patterns: tuple[str, ...] = Field(
        default=(),
        description="what attention reads by on hf, `block_sparse:block=32,top_k=4`, `window:window=128` or"
        " `chunk_summary:chunk=32`: a row of each; none: leave them out",
    )
    kept: tuple[str, ...] = Field(
        default=(),
        description="what is kept of a finished context, under `snapshot`: `latent:rank=128`, or, on hf alone,"
        " `sinks:percent=25`, `attention:percent=25` or `small_keys:percent=25`: a row of each; none: leave them out",
    )
    needles: int = Field(default=200, ge=2, description="retrieval items, each with a text of its own")
    tasks: tuple[Literal["niah_single", "niah_multikey", "niah_multivalue", "vt"], ...] = Field(
        default=("niah_single", "niah_multikey", "niah_multivalue"),
        description="of RULER, written over the stored context on hf under `snapshot`; none: leave them out",
    )
    lengths: tuple[Annotated[int, Field(ge=128)], ...] = Field(
        default=(1024, 2048), min_length=1, description="tokens of the tasks' texts, as far as the model has positions"
    )
    texts: int = Field(default=2, ge=2, description="items of every task at every length, each with a text of its own")
    greedy: int = Field(
        default=12, ge=0, description="windows after which tokens are written greedily on hf under `snapshot`; 0: none"
    )
    claim: Literal["supported", "reviewed_preview", "gated", "artifact_only", "unsupported"] = Field(
        default="supported", description="tier that every row claims; the gate says which one it earns"
    )

    def fitted(self, params: Params) -> Mechanisms:
        """The protocols of the run, and the codecs that are measured at all, or can be under these protocols."""
        forward = tuple(codec for codec in self.codecs if codec in self.in_forward)
        found = self.unsaid(protocols=tuple(dict.fromkeys(params.protocols)), cached_bits=self.bits)
        cut = {"in_forward": forward}
        if "snapshot" not in found.protocols and not {"protocols", "codecs"} <= self.model_fields_set:
            cut["codecs"] = tuple(codec for codec in self.codecs if codec not in KEPT_WHOLE)
        return found.model_copy(update=cut)

    def problems(self, params: Params) -> Iterator[str]:
        """A protocol or pages asked for twice, whose rows would stand there twice; a codec that none can measure."""
        for name in ("protocols", "pages", "caches", "patterns", "kept"):
            asked = getattr(self, name)
            if len(set(asked)) < len(asked):
                yield f"mechanisms.{name} is {list(asked)}; allowed: each once"
        yield from filter(None, (_unknown("patterns", name, PATTERNED) for name in self.patterns))
        yield from filter(None, (_unknown("kept", name, KEPT) for name in self.kept))
        for codec in KEPT_WHOLE if "snapshot" not in self.protocols else ():
            if codec in self.codecs:
                yield (
                    f"mechanisms.codecs names {codec!r}, which codes finished caches, and mechanisms.protocols is"
                    f" {list(self.protocols)}; add snapshot"
                )


def _unknown(key: str, name: str, kinds: tuple[str, ...]) -> str | None:
    """Why a name is of no kind that a row can be of; None where it is one."""
    kind = name.partition(":")[0]
    if kind not in kinds:
        return f"mechanisms.{key} names {name!r}; allowed: {', '.join(kinds)}{suggestion(kind, kinds)}"
    try:
        mechanism(name)
    except UserError as error:
        return f"mechanisms.{key}: {error}"
    return None
