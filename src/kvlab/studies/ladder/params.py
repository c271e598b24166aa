"""The section `ladder`: which codecs stand beside the others, at which bits, on which texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from kvlab.base.params import Params, Section, at_most
from kvlab.base.recipe import Bits, Engine
from kvlab.base.rungs import CONDITIONABLE, LADDERED, Conditionable, Laddered


class Ladder(Section):
    """Every codec at the same bits, on every layer, in float32 and under `snapshot`; on two texts."""

    key = "ladder"
    told = "every codec beside the others (`snakemake ladder`)"
    takes = ("engines", "corpus", "windows")

    engine: Engine = Field(default="hf", description="the one engine that it runs on; default: hf if it runs")
    codecs: tuple[Laddered, ...] = Field(default=LADDERED, min_length=1, description="those that are compared")
    bits: tuple[Bits, ...] = Field(
        default=(2, 3, 4), min_length=1, description="of both streams; some codecs have none"
    )
    conditioned: tuple[Conditionable, ...] = Field(
        default=CONDITIONABLE,
        description="those also measured after mean removal, and after mean removal and whitening; default: all that"
        " are compared and can be",
    )
    texts: tuple[Literal["test", "other"], ...] = Field(
        default=("test", "other"), min_length=1, description="`test`, and `other` if there is a second text"
    )
    windows: int = Field(
        default=32, ge=2, description="scored windows of each text; at most, and if not given cut to, what there are"
    )

    def fitted(self, params: Params) -> Ladder:
        """An engine that runs, the codecs that are compared, the texts that there are, and their windows."""
        engine = self.engine if self.engine in params.engines else params.engines[0]
        texts = tuple(text for text in self.texts if text == "test" or params.corpus.other is not None)
        found = self.unsaid(engine=engine, conditioned=tuple(c for c in CONDITIONABLE if c in self.codecs), texts=texts)
        return found.unsaid(windows=min(self.windows, *(getattr(params.windows, text) for text in found.texts)))

    def problems(self, params: Params) -> Iterator[str]:
        """More windows than there are, a text that is not there, and conditioning of what is not compared."""
        if "other" in self.texts and params.corpus.other is None:
            yield "ladder.texts names 'other' but corpus.other is null; name a text, or only 'test'"
        for text in self.texts:
            yield from at_most("ladder.windows", self.windows, f"windows.{text}", getattr(params.windows, text))
        for codec in self.conditioned:
            if codec not in self.codecs:
                allowed = ", ".join(codec for codec in CONDITIONABLE if codec in self.codecs) or "none"
                yield f"ladder.conditioned names {codec!r}, which is not in ladder.codecs; allowed: {allowed}"
