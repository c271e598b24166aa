"""Codecs by name. Apart from `registry`, so that the workflow can read it without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvlab.core.recipe import STREAMS, WHOLE, Recipe, StreamRecipe

ALL = {name: stream.built_by for name, stream in STREAMS.items()}
"""Module and class of every codec of kvlab's: ``kvlab.codec.klt.codec:KltCodec``."""

CODECS = {name: place for name, place in ALL.items() if name not in WHOLE}
"""Those that code one tensor at a time, as `kvlab.codec.base.Codec` says."""

UNSTORED = ("noise", "cast", "isotropic")
"""Controls of measurements: they change a tensor and write no codes, so no file and no cache can be made of them."""


def codec_modules(recipes: Iterable[Recipe]) -> list[str]:
    """The modules of kvlab's own codecs that recipes run; they are loaded by name, which no import shows."""
    return sorted({ALL[one.codec].partition(":")[0] for one in _run(recipes) if one.codec in ALL})


def foreign_codecs(recipes: Iterable[Recipe]) -> list[str]:
    """The codecs of other packages that recipes run, each with its package: ``sign (kvlab-sign 1.0)``."""
    return sorted({f"{one.codec} ({one.package} {one.version})" for one in _run(recipes) if one.codec not in ALL})


def _run(recipes: Iterable[Recipe]) -> Iterator[StreamRecipe]:
    """The streams of recipes, and the streams of the codecs that a control stands in the place of."""
    for stream in (stream for recipe in recipes for stream in (recipe.k, recipe.v)):
        yield stream
        if hasattr(stream, "of"):
            yield stream.of
