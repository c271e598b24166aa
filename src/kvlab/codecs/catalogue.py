"""Codecs by name: which there are, what each can do, and the parameters that name one. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from kvlab.codecs import plugins
from kvlab.core.codec_settings import Conditioned, Published
from kvlab.core.errors import suggestion
from kvlab.core.recipe import CODECS, STREAMS, WHOLE, Recipe, StreamRecipe

TENSORWISE = tuple(name for name in CODECS if name not in WHOLE)
"""Those that code one tensor at a time, as `kvlab.codecs.base.Codec` says."""
UNSTORED = tuple(name for name, codec in CODECS.items() if not codec.stores)
"""Controls of measurements: they change a tensor and write no codes, so no file and no cache can be made of them."""
AS_PUBLISHED = tuple(name for name, codec in CODECS.items() if codec.as_published)
"""Codecs that are compared at their published settings alone."""
LADDERED = tuple(
    name for name, codec in CODECS.items() if not codec.control and not codec.as_published and codec.scope == "tensor"
)
"""The codecs that are compared where nothing else is asked for, in the order of pages."""
CONDITIONABLE = tuple(name for name in LADDERED if issubclass(STREAMS[name], Conditioned))
KEPT_WHOLE = tuple(name for name in WHOLE if name not in AS_PUBLISHED)
"""Codecs of whole caches. They are compared over finished caches; inside a forward there is none, and one tensor alone
says them nothing."""
PUBLISHED: dict[str, Published] = {name: one for codec in CODECS.values() for name, one in codec.published.items()}
"""The codecs of other people as they published them, exact tokens and all, by the name under which they may be asked
for. `kivi`, `oscar` and the others of the ladder are brought to one form instead (K before its rotary embedding, every
token coded, groups of 64), so that what differs is the codec."""
PIPELINED = tuple(name for name, one in PUBLISHED.items() if one.in_pipeline)
"""The published ones that a parameter may name."""


def has_bits(codec: str) -> bool:
    """Whether the codec's recipe has bits to choose."""
    if codec in PUBLISHED:
        return not PUBLISHED[codec].fixed
    return "bits" in plugins.settings_of(codec).model_fields


def rates(codec: str, bits: tuple[int, ...], whole_bits: tuple[float, ...]) -> tuple[float | None, ...]:
    """The bits at which a codec is compared: `whole_bits` of one of whole caches, None of one without a choice."""
    if codec in KEPT_WHOLE:
        return whole_bits
    return bits if has_bits(codec) else (None,)


def codec_modules(recipes: Iterable[Recipe]) -> list[str]:
    """The modules of kvlab's own codecs that recipes run; they are loaded by name, which no import shows."""
    return sorted({CODECS[one.codec].codec.partition(":")[0] for one in _run(recipes) if one.codec in CODECS})


def foreign_codecs(recipes: Iterable[Recipe]) -> list[str]:
    """The codecs of other packages that recipes run, each with its package: ``sign (kvlab-sign 1.0)``."""
    return sorted({f"{one.codec} ({one.package} {one.version})" for one in _run(recipes) if one.codec not in CODECS})


def _run(recipes: Iterable[Recipe]) -> Iterator[StreamRecipe]:
    """The streams of recipes, and the streams of the codecs that a control stands in the place of."""
    for stream in (stream for recipe in recipes for stream in (recipe.k, recipe.v)):
        yield stream
        if hasattr(stream, "of"):
            yield stream.of


# Types of parameters that name codecs.


def one_of(allowed: tuple[str, ...], plugin: bool = False, conditioned: bool = False) -> Any:
    """A name among these, which the JSON schema lists, so that editors offer them.

    With `plugin` the name of a codec of another package too; of one that can be conditioned, if so asked.
    """

    def check(name: str) -> str:
        """The name, or `ValueError`."""
        if name in allowed:
            return name
        others = plugins.names() if plugin and name not in STREAMS else ()
        if name not in others:
            known = (*allowed, *others)
            raise ValueError(f"{name!r} is not allowed here; allowed: {', '.join(known)}{suggestion(name, known)}")
        if conditioned and not issubclass(plugins.settings_of(name), Conditioned):
            raise ValueError(f"codec {name!r} cannot be conditioned; its settings have no center and whiten")
        return name

    return AfterValidator(check), Field(json_schema_extra={"enum": list(allowed)})


Laddered = Annotated[(str, *one_of(LADDERED, plugin=True))]
Finished = Annotated[(str, *one_of((*LADDERED, *KEPT_WHOLE), plugin=True))]
"""Where finished caches are coded as well as unfinished ones."""
Compared = Annotated[(str, *one_of((*LADDERED, *KEPT_WHOLE, *PIPELINED), plugin=True))]
"""Where finished caches are coded and compared; a published codec may keep tokens at their ends as they are."""
Conditionable = Annotated[(str, *one_of(CONDITIONABLE, plugin=True, conditioned=True))]
Conditioning = Literal["", "center", "center+whiten", "center+weigh"]  # before a codec, calibrated
WholeBits = Annotated[float, Field(gt=0, le=16)]
"""Of a codec of whole caches: what all of a cache's file takes per value."""
