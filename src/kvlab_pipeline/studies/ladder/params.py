"""The section `ladder`: which codecs stand beside the others, at which bits, on which texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from kvlab.codecs.catalogue import CONDITIONABLE, Compared, Conditionable, Laddered, WholeBits
from kvlab.core.codec_settings import Bits
from kvlab.core.params import Params, Section, at_most
from kvlab.core.recipe import Engine

Share = Annotated[float, Field(gt=0, lt=1)]
Ablated = Literal["escapes", "budget", "tables", "allocation", "joint", "transform", "metric"]

CONTEXT_CODECS = ("klt", "hadamard")  # at longer contexts, as far as they are compared: of two the difference is told
USUAL = ("klt", "hadamard", "kivi", "int", "fp8", "archive")
"""The default: few enough for a run of everything on two cores, and one of each family."""


class Ladder(Section):
    """Every codec at the same bits, on every layer, in float32 and under `snapshot`; on two texts."""

    key = "ladder"
    told = "every codec beside the others"
    takes = ("engines", "corpus", "windows")

    engine: Engine = Field(default="hf", description="the one engine that it runs on; default: hf if it runs")
    codecs: tuple[Compared, ...] = Field(default=USUAL, min_length=1, description="those that are compared")
    bits: tuple[Bits, ...] = Field(default=(2, 4), min_length=1, description="of both streams; some codecs have none")
    whole_bits: tuple[WholeBits, ...] = Field(
        default=(2,),
        min_length=1,
        description="of codecs of whole caches, such as `archive`: what all of a file takes per value, such as 1.6",
    )
    conditioned: tuple[Conditionable, ...] = Field(
        default=(),
        description="those also measured after mean removal, and after mean removal in either metric: Sigma_q of lag 0"
        " (`whiten`), or that of `klt` (`weigh`)",
    )
    texts: tuple[Literal["test", "other"], ...] = Field(
        default=("test", "other"),
        min_length=1,
        description="`test`, and `other` if there is a second text that `test` does not hold",
    )
    windows: int = Field(
        default=8,
        ge=2,
        description="scored windows of each text; at most, and if not given cut to, what there are; a text of which"
        " they hold a single one is left out of the page",
    )

    ablated: tuple[Ablated, ...] = Field(
        default=get_args(Ablated),
        description="parts of `klt` taken out, one at a time, at the fewest bits; none where it is not compared",
    )
    in_forward: tuple[Laddered, ...] = Field(
        default=("klt", "hadamard"),
        description="codecs also measured under `in_forward` at their fewest bits, with the scored tokens coded and"
        " without, as far as they are compared",
    )
    fewer: int = Field(
        default=8,
        ge=2,
        description="windows of `ablated` and `in_forward`; at most, and if not given cut to, `windows`",
    )

    growth: tuple[Share, ...] = Field(
        default=(),
        description="parts of the calibration's windows that `klt`, if it is compared, is fitted on too, such as 0.25",
    )
    contexts: tuple[Annotated[int, Field(ge=8)], ...] = Field(
        default=(),
        description="further contexts at which `klt` and `hadamard` are measured, such as 2048, as far as the model has"
        " positions; none: []",
    )
    context_windows: int = Field(default=8, ge=2, description="windows of each of `contexts`")

    def fitted(self, params: Params) -> Ladder:
        """An engine that runs, the codecs that are compared, the texts that there are, each once, and their windows.

        No context that the windows have anyway, or that no codec is measured at, and no growth without `klt`.
        """
        engine = self.engine if self.engine in params.engines else params.engines[0]
        known = params.corpus.other is not None and "other" not in params.corpus.scored
        texts = tuple(text for text in self.texts if text == "test" or known) or ("test",)
        found = self.unsaid(engine=engine, texts=texts)
        found = found.unsaid(windows=min(self.windows, *(getattr(params.windows, text) for text in found.texts)))
        forward = tuple(codec for codec in self.in_forward if codec in self.codecs)
        without = {} if "klt" in self.codecs else {"ablated": (), "growth": ()}
        able = set(CONTEXT_CODECS) & set(self.codecs)
        without |= {"contexts": tuple(one for one in self.contexts if able and one != params.windows.context)}
        found = found.unsaid(fewer=min(self.fewer, found.windows))
        return found.model_copy(update={"in_forward": forward} | without)

    def problems(self, params: Params) -> Iterator[str]:
        """More windows than there are, a text that is not there or twice, and conditioning of what is not compared."""
        if "other" in self.texts and params.corpus.other is None:
            yield "ladder.texts names 'other' but corpus.other is null; name a text, or only 'test'"
        elif "other" in self.texts and "other" in params.corpus.scored:
            yield "ladder.texts names 'other', which corpus.scored puts among the windows of 'test'; name only 'test'"
        yield from at_most("ladder.fewer", self.fewer, "ladder.windows", self.windows)
        for text in self.texts:
            yield from at_most("ladder.windows", self.windows, f"windows.{text}", getattr(params.windows, text))
        yield from self._unconditioned()

    def _unconditioned(self) -> Iterator[str]:
        """Conditioning of what is not compared."""
        for codec in self.conditioned:
            if codec not in self.codecs:
                allowed = ", ".join(codec for codec in CONDITIONABLE if codec in self.codecs) or "none"
                yield f"ladder.conditioned names {codec!r}, which is not in ladder.codecs; allowed: {allowed}"
