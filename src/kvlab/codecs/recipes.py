"""From the name of a codec and its bits, as a person types it, to a recipe: the one way. Torch-free."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from kvlab.codecs.block.studied import studied_recipe
from kvlab.codecs.catalogue import AS_PUBLISHED, CONDITIONABLE, PUBLISHED, UNSTORED, has_bits
from kvlab.codecs.plugins import names, plugin_stream, settings_of
from kvlab.core.codec_settings import Conditioned, Frozen
from kvlab.core.errors import CapabilityError, ParamsError, UnknownName
from kvlab.core.params import Params
from kvlab.core.recipe import CODECS, STREAMS, Recipe, StreamRecipe

CONDITIONS = {
    "": {},
    "bias": {"center": "bias"},
    "center": {"center": True},
    "center+whiten": {"center": True, "whiten": True},
    "center+weigh": {"center": True, "weigh": True},
}
ROTARIES = ("before", "after")
STUDIED = "studied"
"""The name of the recipe that params.yaml describes."""


def named_recipe(
    codec: str,
    bits: float | None = None,
    v_bits: float | None = None,
    params: Params | None = None,
    rotary: str | None = None,
    **settings,
) -> Recipe:
    """The recipe that codes K and V with one codec.

    Parameters
    ----------
    codec : str
        A codec, which may have mean removal and whitening of K in front of it: ``klt``, ``hadamard``,
        ``int+bias``, ``int+center``, ``int+center+whiten``, ``int+center+weigh``; one as published
        (`catalogue.PUBLISHED`), such as ``kivi-paper``, or as an engine stores it, such as ``q4_0`` or ``q4_0+bias``;
        one of another package, by its name; or ``studied``, the recipe of `params`.
    bits, v_bits : float, optional
        Of K, and of V where they differ; else those of `params`. A codec without a choice, such as ``fp8``, takes none.
    params : Params, optional
        `codec` and `calibration` of params.yaml describe ``block``, which is the studied recipe on the Gaussian table.
    rotary : {"before", "after"}, optional
        Whether K is coded before its rotary embedding or after it; by default as the codec's name says, mostly before.
        ``klt`` after it has no escapes unless they are asked for: it is for pages of a server, which read it quickest.
    **settings
        Other settings of the codec, for K and V alike, such as ``block_size=64``.

    Raises
    ------
    UnknownName
        No codec has that name, or nothing that may stand in front of one.
    ParamsError
        Bits or settings that the codec does not have, or bits that it needs and that are not given.
    CapabilityError
        It is a control of measurements, which stores nothing, or is described in params.yaml, and there is none.
    """
    if rotary is not None:
        if rotary == "after" and codec == "klt":
            settings = {"escape": False} | settings
        found = named_recipe(codec, bits, v_bits, params, **settings)
        if rotary not in ROTARIES:
            raise UnknownName("rotary", rotary, ROTARIES)
        if codec.partition("+")[0] in PUBLISHED and rotary != found.rotary:
            raise ParamsError(
                f"codec {codec!r} is as published, with rotary: {found.rotary}; leave rotary out",
                code="params.rotary-as-published",
            )
        return Recipe(k=found.k, v=found.v, rotary=rotary)
    if params is not None and bits is None and codec != STUDIED and _takes_bits(codec):
        bits, v_bits = params.bits, params.v_bits
    if codec.partition("+")[0] in PUBLISHED:
        return _published(codec, bits, v_bits, settings)
    name, condition = _known(codec, params)
    if name in (STUDIED, "block"):
        return _described(name, bits, v_bits, params)
    field = settings_of(name).model_fields.get("bits")
    if field and bits is None and (v_bits is not None or field.is_required()):
        raise ParamsError(f"codec {name!r} needs bits; give for example bits=4", code="params.needs-bits")
    if not field and (bits, v_bits) != (None, None):
        raise ParamsError(f"codec {name!r} has no choice of bits; leave them out", code="params.no-bits")
    given = field and bits is not None  # another package's codec may have bits by default
    k, v = ({"bits": bits}, {"bits": bits if v_bits is None else v_bits}) if given else ({}, {})
    of_k, of_v = CODECS[name].own(bits, v.get("bits")) if name in CODECS else ({}, {})
    k |= of_k | CONDITIONS[condition] | settings
    v |= of_v | {front: how for front, how in CONDITIONS[condition].items() if front != "whiten"}
    return Recipe(k=stream_recipe(name, **k), v=stream_recipe(name, **(v | settings)))


def _takes_bits(codec: str) -> bool:
    name = codec.partition("+")[0]
    return name in (*PUBLISHED, *STREAMS, *names()) and has_bits(name)


def _known(codec: str, params: Params | None) -> tuple[str, str]:
    """Name and condition of a codec that can be run."""
    name, _, condition = codec.partition("+")
    condition = "" if condition == "none" else condition
    others = names()  # first of all: a package that takes one of kvlab's names is refused
    if name not in (*STREAMS, *others, STUDIED):
        described = (STUDIED,) if params else ()
        left_out = {*UNSTORED, *AS_PUBLISHED, *(() if params else ("block",))}
        kept = (known for known in STREAMS if known not in left_out)
        raise UnknownName("codec", name, (*kept, *PUBLISHED, *others, *described))
    if name in AS_PUBLISHED:
        published = next(iter(CODECS[name].published))
        raise CapabilityError(
            f"codec {name!r} has one recipe, the published one; name {published}", code="capability.one-recipe"
        )
    if name in UNSTORED:
        raise CapabilityError(f"codec {name!r} is a control of measurements and stores nothing; name a codec")
    if name in (STUDIED, "block") and params is None:
        raise CapabilityError(f"codec {name!r} has no settings but those of a params.yaml; write it with kvlab recipe")
    if condition not in CONDITIONS:
        raise UnknownName("what stands in front of a codec", condition, [one or "none" for one in CONDITIONS])
    if condition and (name == STUDIED or not issubclass(settings_of(name), Conditioned)):
        raise ParamsError(
            f"codec {name!r} cannot be conditioned; allowed: {', '.join(CONDITIONABLE)}",
            code="params.not-conditionable",
        )
    return name, condition


def _described(name: str, bits: int | None, v_bits: int | None, params: Params) -> Recipe:
    """The recipe that params.yaml describes, or of ``block`` the same at these bits, on the Gaussian table."""
    if name == STUDIED:
        return studied_recipe(params)
    recipe = studied_recipe(params.model_copy(update={"bits": bits, "v_bits": bits if v_bits is None else v_bits}))
    gaussian = {"codebook": "gaussian"}  # as every other codec of the ladder: none of its tables is fitted
    return Recipe(k=recipe.k.model_copy(update=gaussian), v=recipe.v.model_copy(update=gaussian))


def _published(name: str, bits: float | None, v_bits: float | None, settings: dict[str, Any]) -> Recipe:
    """The recipe of a codec as published, but for `settings`."""
    name, _, condition = name.partition("+")
    if condition and not (condition == "bias" and PUBLISHED[name].fixed):
        raise ParamsError(
            f"codec {name!r} is as published, and cannot be conditioned"
            + (f"; allowed: {name}+bias" if PUBLISHED[name].fixed else ""),
            code="params.not-conditionable",
        )
    settings = CONDITIONS[condition] | settings
    if PUBLISHED[name].fixed:
        if (bits, v_bits) != (None, None):
            raise ParamsError(f"codec {name!r} has no choice of bits; leave them out", code="params.no-bits")
    elif bits is None:
        raise ParamsError(f"codec {name!r} needs bits; give for example bits=4", code="params.needs-bits")
    try:
        return Recipe(**PUBLISHED[name].make(bits, bits if v_bits is None else v_bits, settings))
    except ValidationError as error:
        raise ParamsError(f"codec {name!r}: {_problem(error)}") from None


def stream_recipe(codec: str, **settings) -> StreamRecipe:
    """The recipe of one stream, of kvlab's own codec or another package's.

    Raises
    ------
    UnknownName
        No codec has that name.
    ParamsError
        A setting that it does not know, or out of its range.
    """
    if codec not in STREAMS:
        return plugin_stream(codec, **settings)
    try:
        return STREAMS[codec](**settings)
    except ValidationError as error:
        raise ParamsError(f"codec {codec!r}: {_refusal(STREAMS[codec], error)}") from None


def _refusal(settings: type[Frozen], error: ValidationError) -> str:
    """The first wrong setting, with its range where it is a number out of it, else with what settings there are."""
    problem = _first(error)
    name = str(problem["loc"][0]) if problem["loc"] else ""
    field = settings.model_fields.get(name)
    if field is not None and problem["type"].startswith(RANGES):
        said = ["whole numbers"] if field.annotation is int else []
        for limit, words in LIMITS.items():
            said += [f"{words} {getattr(one, limit):g}" for one in field.metadata if hasattr(one, limit)]
        return f"{name} is {problem['input']!r}; allowed: {', '.join(said)}"
    known = (name for name in settings.model_fields if name != "codec")
    return f"{_problem(error)}; its settings: {', '.join(known) or 'none'}"


RANGES = ("greater_than", "less_than", "int_")
"""How the names of pydantic's faults begin that are of a number's kind or range."""
LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
"""pydantic's limits of a number, and how they are said."""


def _first(error: ValidationError) -> dict[str, Any]:
    """The first mistake; a name that there is not before one that is missing."""
    return min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")


def _problem(error: ValidationError) -> str:
    """The first mistake, where it is, and what was given."""
    problem = _first(error)
    given = "" if isinstance(problem["input"], dict) else f" (given: {problem['input']!r})"
    return f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg']}{given}"
