"""The section `kvstore`: what the studies of the paged cache and of its snapshots share, and the part of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kvlab.codecs.catalogue import KEPT_WHOLE, LADDERED, one_of
from kvlab.core.codec_settings import Bits
from kvlab.core.params import Params, Section, at_most
from kvlab.core.recipe import DType

Counted = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Policy = Literal["lru", "qk", "oracle", "random", "sign_bit"]
Storable = Annotated[(str, *one_of((*LADDERED, *KEPT_WHOLE), plugin=True))]
"""Where finished caches are stored, by codecs of single tensors and of whole caches."""


class RestoreStudy(Section):
    """Cold against warm: identity of what comes out, time, bytes, and what each codec makes of a snapshot."""

    chunk_tokens: int = Field(default=32, ge=1, description="tokens of a chunk")
    prompts: int = Field(
        default=20,
        ge=1,
        description="prompts on which cold and warm must be identical; at most, and if not given cut to, windows.test",
    )
    decode: int = Field(default=64, ge=1, description="tokens decoded after each")
    lengths: tuple[Counted, ...] = Field(
        default=(512, 1024, 2048), min_length=1, description="prompts, in tokens, whose prefill is timed"
    )
    suffix: int = Field(default=96, ge=1, description="tokens of them that no snapshot holds")
    repeats: int = Field(default=7, ge=3, description="how often each is timed; the median counts")
    codecs: tuple[Storable, ...] = Field(
        default=LADDERED, description="payloads beside the raw one, by their name on the ladder; also `archive`"
    )
    bits: tuple[Bits, ...] = Field(default=(2, 4), min_length=1, description="of K and of V, for codecs that have any")

    def fitted(self, params: Params) -> RestoreStudy:
        """As many prompts as there are windows, none longer than their text, and a chunk of each to restore."""
        text = params.windows.test * params.windows.length
        lengths = tuple(length for length in self.lengths if length <= text) or (text,)
        found = self.unsaid(prompts=min(self.prompts, params.windows.test), lengths=lengths)
        shortest = min(found.lengths)
        found = found.unsaid(chunk_tokens=min(self.chunk_tokens, max(shortest // 4, 1)))
        return found.unsaid(suffix=min(self.suffix, max(shortest - found.chunk_tokens, 1)))

    def problems(self, params: Params) -> Iterator[str]:
        """More prompts or longer ones than there are, and prompts that leave no whole chunk to restore."""
        text = params.windows.test * params.windows.length
        yield from at_most("kvstore.restore.prompts", self.prompts, "windows.test", params.windows.test)
        for length in self.lengths:
            if length > text:
                yield f"kvstore.restore.lengths names {length}; allowed: at most {text}, the tokens of the test split"
            if length < self.suffix + self.chunk_tokens:
                yield (
                    f"kvstore.restore.lengths names {length}, and a suffix of {self.suffix} leaves no whole chunk of"
                    f" {self.chunk_tokens} to restore; allowed: at least {self.suffix + self.chunk_tokens}"
                )


class PolicyStudy(Section):
    """Which chunks a bounded pool should keep: needles found, and attention mass kept."""

    chunk_tokens: int = Field(default=8, ge=1, description="tokens of a chunk")
    sink_chunks: int = Field(default=1, ge=0, description="first chunks, which always stay")
    tail_chunks: int = Field(default=1, ge=0, description="chunks before the head, which always stay")
    every: int = Field(default=1, ge=1, description="tokens after which the pool is chosen anew")
    policies: tuple[Policy, ...] = Field(
        default=("lru", "qk", "oracle", "random", "sign_bit"), min_length=1, description="who stays"
    )
    pools: tuple[Share, ...] = Field(
        default=(0.25, 0.1), min_length=1, description="sizes of the pool, as shares of the context"
    )
    needles: int = Field(
        default=64,
        ge=2,
        description="items, from the first on, of those that the gate's rows are judged on; at most, and if not given"
        " cut to, mechanisms.needles",
    )

    def fitted(self, params: Params) -> PolicyStudy:
        """As many needles as there are."""
        return self.unsaid(needles=min(self.needles, params.mechanisms.needles))

    def problems(self, params: Params) -> Iterator[str]:
        """More needles than there are."""
        yield from at_most("kvstore.policy.needles", self.needles, "mechanisms.needles", params.mechanisms.needles)


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


class KVStore(Section):
    """The paged KV cache and its snapshots, studied on hf."""

    key = "kvstore"
    told = "the paged cache and its snapshots"
    takes = ("windows", "mechanisms")

    dtype: DType = Field(default="float32", description="what the model computes in, and what K and V are held in")
    restore: RestoreStudy = RestoreStudy()
    policy: PolicyStudy = PolicyStudy()
    bitplanes: BitplanesStudy = BitplanesStudy()
    placement: PlacementStudy = PlacementStudy()

    def fitted(self, params: Params) -> KVStore:
        """Each part fitted."""
        return self.model_copy(update={name: part.fitted(params) for name, part in self._parts().items()})

    def problems(self, params: Params) -> Iterator[str]:
        """Those of each part."""
        for part in self._parts().values():
            yield from part.problems(params)

    def _parts(self) -> dict[str, Section]:
        return {name: getattr(self, name) for name in ("restore", "policy", "bitplanes", "placement")}
