"""What a codec does (`Recipe`) and where it does it (`Cell`), as values with identities.

A recipe is canonical JSON; its sha256 is the `recipe_id` that every result row carries. Two numbers
may be compared only when the ids of everything outside the compared factor are equal.
"""

from __future__ import annotations

import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_serializer, model_validator

from kvlab.core.codec_settings import Frozen, IdentityStream, Plugin, without
from kvlab.core.engines import EngineInfo
from kvlab.core.errors import suggestion

DType = Literal["float32", "bfloat16"]
Protocol = Literal["in_forward", "snapshot"]
Stream = Literal["k", "v", "kv"]
Text = Literal["test", "other", "calib"]
Attention = Literal["default", "eager", "sdpa"]  # `default`: what the engine's cells run with
Placement = Literal["pre_rope", "post_rope"]  # K is coded before or after its rotary embedding
Span = Literal["context", "window"]  # which tokens are coded: the context, or the scored ones too

ID_LENGTH = 12
RECIPE_VARIABLE = "KVLAB_RECIPE"  # names the file of the recipe that the vLLM plugin runs beside vLLM's own cache
PAGES_VARIABLE = "KVLAB_PAGES"  # the same of one whose bytes vLLM's cache holds in place of K and V
PAGES_EXACT = {"sink": 16, "recent": 512}  # the most tokens of a request that such a cache keeps exact

FIRST = (
    *("hf", "vllm"),
    *("identity", "klt", "hadamard", "kivi", "oscar", "int", "d4", "e8", "block", "fp8", "nf4"),
    *("turboquant", "kvquant", "archive", "kvtc", "aquakv", "noise", "cast", "isotropic"),
)
"""The order of pages; what is not named here comes after these."""


def _folders(kind: str, file: str, what: str) -> dict[str, Any]:
    """What the folders of one kind that hold a file say of themselves, by name: a constant of their ``__init__.py``."""
    folders = (path.parent.name for path in (Path(__file__).parents[1] / kind).glob(f"*/{file}"))
    names = sorted(folders, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    return {name: getattr(import_module(f"kvlab.{kind}.{name}"), what) for name in names}


ENGINES: dict[str, EngineInfo] = _folders("engines", "engine.py", "ENGINE")
"""The engines: every folder of `kvlab.engines` with an ``engine.py`` and an `ENGINE`."""
CODECS: dict[str, Plugin] = _folders("codecs", "codec.py", "CODEC")
"""kvlab's codecs: every folder of `kvlab.codecs` with a ``codec.py`` and a `CODEC`."""
Engine = Literal[tuple(ENGINES)]
STREAMS: dict[str, type[Frozen]] = {name: codec.settings for name, codec in CODECS.items()}
"""The settings of every codec of kvlab's, by its name."""
CONTROLS = tuple(name for name, codec in CODECS.items() if codec.control)
"""What sits in a codec's place without being one."""
WHOLE = tuple(name for name, codec in CODECS.items() if codec.scope == "cache")
"""Codecs that code all layers of a cache at once."""


class PluginStream(Frozen):
    """One stream of a codec of another package, which `kvlab.codecs.plugins` finds by its entry point.

    Every other field is one of that codec's own settings, all of them, defaults included. Name and version of the
    package are in the identity of the recipe, so that two versions of a codec are two codecs.

    Parameters
    ----------
    codec : str
        The name of the entry point.
    package, version : str
        The distribution that it came with.
    reads : tuple of {"whitener", "components"}
        What the codec reads of a calibration besides what `center` and `whiten` ask for.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    codec: str
    package: str
    version: str
    reads: tuple[Literal["whitener", "components"], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """A name that is no codec of kvlab's, without a package that it could be of, is a mistake."""
        if not isinstance(data, dict) or "package" in data:
            return data
        name, allowed = data.get("codec"), ", ".join(STREAMS)
        if not isinstance(name, str):
            raise ValueError(f"no codec is named; allowed: {allowed}")
        raise ValueError(f"codec {name!r} is not known; allowed: {allowed}{suggestion(name, STREAMS)}")

    @property
    def settings(self) -> dict[str, Any]:
        """The codec's own settings."""
        return dict(self.__pydantic_extra__ or {})


def _kind(stream: Any) -> str:
    """Which of the models below a stream is of: by its codec's name, and else a codec of another package."""
    name = stream.get("codec") if isinstance(stream, dict) else getattr(stream, "codec", None)
    return name if isinstance(name, str) and name in STREAMS else "plugin"


StreamRecipe = Annotated[
    Union[tuple(Annotated[m, Tag(n)] for n, m in (STREAMS | {"plugin": PluginStream}).items())],  # noqa: UP007
    Discriminator(_kind),
]
"""What is done to one stream."""


def canonical(value: BaseModel | dict) -> str:
    """Canonical JSON: sorted keys, no spaces; equal values give equal text."""
    data = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: BaseModel | dict) -> str:
    """First 12 hexadecimal digits of the sha256 of the canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:ID_LENGTH]


class Recipe(Frozen):
    """Everything that decides what a codec does to K and to V.

    `rotary` says whether K is coded before its rotary embedding or after it. A recipe says nothing of it where it
    is the default, so that ids are those of before there was a choice.
    """

    k: StreamRecipe
    v: StreamRecipe
    rotary: Literal["before", "after"] = "before"

    @model_validator(mode="after")
    def _whole_alike(self) -> Recipe:
        """A codec of whole caches codes K and V, both before the rotary embedding; bits may differ if not shared."""
        whole = {one.codec for one in (self.k, self.v)} & {*WHOLE}
        apart = {"bits"} if "archive" not in whole else set()
        k, v = (one.model_dump(exclude=apart) for one in (self.k, self.v))
        if whole and (k != v or self.rotary != "before"):
            raise ValueError(f"{whole.pop()} codes whole caches: K and V alike, before the rotary embedding")
        return self

    @model_validator(mode="after")
    def _budgets_agree(self) -> Recipe:
        """K and V that share a budget are coded alike."""
        names = ("codec", "bits", "budget", "block_size")
        k, v = ([getattr(one, name, None) for name in names] for one in (self.k, self.v))
        if k != v and {"layer", "cache"} & {k[2], v[2]}:
            raise ValueError("klt whose budget is of K and V needs both, with equal bits, budget and block_size")
        return self

    @model_serializer(mode="wrap")
    def _said(self, whole) -> dict[str, Any]:
        return without(whole(self), {"rotary": "before"})

    @property
    def placement(self) -> Placement:
        """Where K is coded, as a cell says it."""
        return "post_rope" if self.rotary == "after" else "pre_rope"

    @property
    def recipe_id(self) -> str:
        """Identity of the recipe."""
        return digest(self)


class LayerRecipe(Frozen):
    """A recipe for some layers only."""

    layers: tuple[int, ...] = Field(min_length=1)
    recipe: Recipe


class Cell(Frozen):
    """One measurement: an engine, a dtype and a protocol, a recipe, the coded layers and streams.

    Parameters
    ----------
    label : str
        A readable name inside its study; not part of the identity.
    attention : Attention
        The engine's attention implementation.
    placement : Placement
        Whether K is coded before its rotary embedding or after it.
    span : Span
        Which tokens of a window are coded.
    origin : Engine
        Whose capture fitted the calibration that the codec reads, if it reads any.
    layers : tuple of int
        Those that are coded.
    exceptions : tuple of LayerRecipe
        Coded layers whose recipe is not `recipe`.
    text : Text
        Which windows are scored: those of the test split, of the other text, or of the calibration split (to
        choose by, never to report).
    """

    study: str
    label: str
    engine: Engine
    dtype: DType
    attention: Attention = "default"
    protocol: Protocol
    placement: Placement = "pre_rope"
    span: Span = "context"
    origin: Engine
    stream: Stream
    layers: tuple[int, ...]
    windows: int = Field(ge=1)
    text: Text = "test"
    recipe: Recipe
    exceptions: tuple[LayerRecipe, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _placed(cls, data: Any) -> Any:
        """A recipe for K after its rotary embedding puts the cell there."""
        recipe = data.get("recipe") if isinstance(data, dict) else None
        after = recipe.get("rotary") if isinstance(recipe, dict) else getattr(recipe, "rotary", None)
        return data | {"placement": "post_rope"} if after == "after" else data

    @property
    def recipe_id(self) -> str:
        """Identity of the recipe."""
        return self.recipe.recipe_id

    @property
    def cell_id(self) -> str:
        """Identity of the cell: of everything but its label."""
        return digest(self.model_dump(mode="json", exclude={"label"}))

    def stream_recipe(self, stream: Literal["k", "v"], layer: int | None = None) -> StreamRecipe:
        """The recipe of one stream, of `layer` if given; identity when the cell does not code that stream."""
        if stream not in self.stream:
            return IdentityStream()
        own = [special.recipe for special in self.exceptions if layer in special.layers]
        recipe = own[0] if own else self.recipe
        return recipe.k if stream == "k" else recipe.v

    @property
    def family(self) -> tuple[str, ...] | None:
        """What cells have in common that are computed by the same code: engine, way into it, and codecs; None without.

        What changes nothing, on no layer or on all, is of no family: it is a floor.
        """
        if not self.layers or self.recipe == IDENTITY:
            return None
        codecs = tuple(self.stream_recipe(stream, self.layers[0]).codec for stream in ("k", "v"))
        return (self.engine, self.dtype, self.attention, self.protocol, self.placement, self.span, *codecs)

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """All recipes that it runs, that of most layers first."""
        return (self.recipe, *(special.recipe for special in self.exceptions))


SPAN_OF: dict[str, Span] = {"snapshot": "context", "in_forward": "window", "served": "window"}
"""Which tokens a protocol stores: a snapshot holds the context alone, the scored tokens' own K and V are exact."""
IDENTITY = Recipe(k=IdentityStream(), v=IdentityStream())
