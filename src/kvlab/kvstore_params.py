"""The section `kvstore` of params.yaml: what is asked of the paged cache and of its snapshots."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvlab.ladder_names import Laddered
from kvlab.recipe import DType, Frozen

Share = Annotated[float, Field(gt=0, le=1)]
Counted = Annotated[int, Field(ge=1)]
Bits = Annotated[int, Field(ge=1, le=8)]
Policy = Literal["lru", "qk", "oracle", "random", "sign_bit"]


class RestoreStudy(Frozen):
    """Cold against warm: identity of what comes out, time, bytes, and what each codec makes of a snapshot."""

    chunk_tokens: int = Field(ge=1, description="tokens of a chunk")
    prompts: int = Field(ge=1, description="prompts on which cold and warm must be identical")
    decode: int = Field(ge=1, description="tokens decoded behind each")
    lengths: tuple[Counted, ...] = Field(min_length=1, description="prompts, in tokens, whose prefill is timed")
    suffix: int = Field(ge=1, description="tokens of them that no snapshot holds")
    repeats: int = Field(ge=3, description="how often each is timed; the median counts")
    codecs: tuple[Laddered, ...] = Field(description="payloads beside the raw one, by their name on the ladder")
    bits: tuple[Bits, ...] = Field(min_length=1, description="of K and of V, for codecs that have any")

    @model_validator(mode="after")
    def _behind(self) -> RestoreStudy:
        short = [length for length in self.lengths if length < self.suffix + self.chunk_tokens]
        if short:
            raise ValueError(
                f"lengths names {short[0]}, and a suffix of {self.suffix} leaves no whole chunk of {self.chunk_tokens}"
                " to restore"
            )
        return self


class PolicyStudy(Frozen):
    """Which chunks a bounded pool should keep: needles found, and attention mass kept."""

    chunk_tokens: int = Field(ge=1, description="tokens of a chunk")
    sink_chunks: int = Field(ge=0, description="first chunks, which always stay")
    tail_chunks: int = Field(ge=0, description="chunks in front of the head, which always stay")
    every: int = Field(ge=1, description="tokens after which the pool is chosen anew")
    policies: tuple[Policy, ...] = Field(min_length=1, description="who stays")
    pools: tuple[Share, ...] = Field(min_length=1, description="sizes of the pool, as shares of the context")
    needles: int = Field(ge=2, description="items, from the first on, of those that the gate's rows are judged on")


class BitplanesStudy(Frozen):
    """How well a few bits of each key rank what attention looks at."""

    windows: int = Field(ge=2, description="texts")
    queries: int = Field(ge=1, description="positions of each text from which is looked back")
    groups: tuple[Counted, ...] = Field(min_length=1, description="numbers that share a scale")
    kept: tuple[Share, ...] = Field(min_length=1, description="shares of the tokens that are kept")
    chunk_tokens: int = Field(ge=1, description="tokens of a chunk, where whole chunks are kept")
    sinks: int = Field(ge=0, description="first tokens that are kept in any case, in the variant with such")
    recent: int = Field(ge=0, description="last tokens that are kept in any case, in the variant with such")


class PlacementStudy(Frozen):
    """Whether it matters in which block a chunk lies."""

    chunk_tokens: int = Field(ge=1, description="tokens of a chunk")
    windows: int = Field(ge=1, description="texts")
    orders: int = Field(ge=2, description="random orders of the blocks, shared out among the texts")
    decode: int = Field(ge=1, description="tokens decoded behind each")


class KVStore(Frozen):
    """The paged KV cache and its snapshots, studied on hf."""

    dtype: DType = Field(description="what the model computes in, and what K and V are held in")
    restore: RestoreStudy
    policy: PolicyStudy
    bitplanes: BitplanesStudy
    placement: PlacementStudy
