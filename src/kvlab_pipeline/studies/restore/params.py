"""The part `kvstore.restore`: cold against warm, how often, on prompts of which lengths, with which codecs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from kvlab.codecs.catalogue import KEPT_WHOLE, LADDERED, one_of
from kvlab.core.codec_settings import Bits
from kvlab.core.params import Params, Section, at_most

Counted = Annotated[int, Field(ge=1)]
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
