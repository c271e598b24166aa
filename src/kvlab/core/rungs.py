"""The recipes that are measured side by side: every codec at the same bits, conditioned or not. Torch-free."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from kvlab.core import plugins
from kvlab.core.errors import ParamsError, UnknownName, suggestion
from kvlab.core.params import Params
from kvlab.core.recipe import CONTROLS, STREAMS, WHOLE, Conditioned, Recipe
from kvlab.core.rivals import RIVALS, rival_recipe
from kvlab.core.studied import studied_recipe

ASKED_AS_RIVALS = (
    "turboquant",
    "kvquant",
    "kvtc",
    "aquakv",
)  # codecs that are compared at their published settings alone
LADDERED = tuple(name for name in STREAMS if name not in (*CONTROLS, *ASKED_AS_RIVALS, *WHOLE))
"""The codecs that are compared where nothing else is asked for, in the order of pages."""
PIPELINED = ("kivi-paper", "kivi-g32", "turboquant-vllm")
"""The published ones that a parameter may name beside them. The others read what no file of the pipeline holds;
`kvlab measure` and `kvlab calibrate` know them."""
KEPT_WHOLE = tuple(name for name in WHOLE if name in STREAMS and name not in ASKED_AS_RIVALS)
"""Codecs of whole caches. They are compared over finished caches; inside a forward there is none, and one tensor alone
says them nothing."""
CONDITIONABLE = tuple(name for name in LADDERED if issubclass(STREAMS[name], Conditioned))
Conditioning = Literal["", "center", "center+whiten", "center+weigh"]  # before a codec, calibrated
STUDIED = "studied"

UNCLIPPED = 4  # bits from which OSCAR's clipping (.96 of K and .92 of V, meant for 2 bits) costs more than it gains


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
WholeBits = Annotated[float, Field(gt=0, le=16)]
"""Of a codec of whole caches: what all of a cache's file takes per value."""
Conditionable = Annotated[(str, *one_of(CONDITIONABLE, plugin=True, conditioned=True))]


def own_settings(codec: str, bits: float | None, v_bits: float | None) -> tuple[dict, dict]:
    """What a codec's recipe says besides bits and conditioning, for K and for V."""
    if codec == "kivi":
        return {"axis": "channel"}, {"axis": "token"}
    if codec == "oscar":
        return {"clip": 0.96 if bits < UNCLIPPED else 1.0}, {"clip": 0.92 if v_bits < UNCLIPPED else 1.0}
    if codec == "klt":  # what K and V of all layers lose is weighed alike, unless somebody said what each shall have
        budget = "cache" if bits == v_bits else "stream"
        return {"budget": budget}, {"budget": budget}
    return {}, {}


def default_recipe(params: Params) -> Recipe:
    """What the drop-ins run when they are told no other: `klt` at the bits of params.yaml."""
    return ladder_recipe("klt", params.bits, "", params, params.v_bits)


def ladder_recipe(
    codec: str, bits: float | None, conditioning: Conditioning, params: Params, v_bits: int | None = None
) -> Recipe:
    """The recipe of one rung.

    Parameters
    ----------
    codec : str
        A name of `LADDERED`, of `KEPT_WHOLE`, or of `RIVALS`.
    bits : float or None
        None for a codec that has no choice, as `fp8`; whole but for a codec of whole caches.
    conditioning : str
        Empty; ``center``, which removes the calibrated mean of K and of V; ``center+whiten``, which
        whitens K as well, by Sigma_q at lag 0; or ``center+weigh``, which brings K and V into the metric of `klt`.
    params : Params
        `codec` and `calibration` describe the `block` rung, which is the studied recipe on the Gaussian table.
    v_bits : int, optional
        Of V; as of K when left out.

    Raises
    ------
    UnknownName
        No rung has that name, or no conditioning.
    ParamsError
        The codec cannot be conditioned (it brings its own), or takes no bits or needs some.
    """
    if codec in RIVALS:
        if conditioning:
            raise ParamsError(f"codec {codec!r} is as published, and cannot be conditioned")
        return rival_recipe(codec, bits, v_bits)
    if codec not in (*LADDERED, *KEPT_WHOLE) and codec not in plugins.names():
        raise UnknownName("codec of the ladder", codec, (*LADDERED, *KEPT_WHOLE, *PIPELINED, *plugins.names()))
    if conditioning not in get_args(Conditioning):
        raise UnknownName("conditioning", conditioning, [name or "none" for name in get_args(Conditioning)])
    if conditioning and not issubclass(plugins.settings_of(codec), Conditioned):
        raise ParamsError(f"codec {codec!r} cannot be conditioned; allowed: {', '.join(CONDITIONABLE)}")
    if (bits is None) == has_bits(codec):
        why = "it needs some" if bits is None else "it has no bits to choose"
        raise ParamsError(f"codec {codec!r} at bits {bits}: {why}")
    if codec == "block":
        return _block(bits, bits if v_bits is None else v_bits, params)
    bits_of = {"k": bits, "v": bits if v_bits is None else v_bits}
    k, v = own_settings(codec, *bits_of.values())
    common = {"center": True} if conditioning else {}
    common |= {"weigh": True} if conditioning == "center+weigh" else {}
    if conditioning == "center+whiten":
        k |= {"whiten": True}
    if has_bits(codec):
        k, v = k | {"bits": bits_of["k"]}, v | {"bits": bits_of["v"]}
    stream = STREAMS[codec] if codec in STREAMS else partial(plugins.plugin_stream, codec)
    return Recipe(k=stream(**common, **k), v=stream(**common, **v))


def rates(codec: str, bits: tuple[int, ...], whole_bits: tuple[float, ...]) -> tuple[float | None, ...]:
    """The bits at which a codec is compared: `whole_bits` of one of whole caches, None of one without a choice."""
    if codec in KEPT_WHOLE:
        return whole_bits
    return bits if has_bits(codec) else (None,)


def has_bits(codec: str) -> bool:
    """Whether the codec's recipe has bits to choose."""
    return codec in RIVALS or "bits" in plugins.settings_of(codec).model_fields


def _block(bits: int, v_bits: int, params: Params) -> Recipe:
    recipe = studied_recipe(params.model_copy(update={"bits": bits, "v_bits": v_bits}))
    gaussian = {"codebook": "gaussian"}  # as every other rung: no table of the ladder is fitted, so it reads none
    return Recipe(k=recipe.k.model_copy(update=gaussian), v=recipe.v.model_copy(update=gaussian))


def labelled(name: str, params: Params) -> Recipe:
    """The recipe that a person names, K at ``bits`` and V at ``v_bits``.

    Parameters
    ----------
    name : str
        A rung as ``codec[+center[+whiten]]``, or ``studied``: the recipe of params.yaml.

    Raises
    ------
    UnknownName
        No codec, or no conditioning, has that name.
    """
    if name == STUDIED:
        return studied_recipe(params)
    codec, _, conditioning = name.partition("+")
    if codec not in (*LADDERED, *RIVALS) and codec not in plugins.names():
        raise UnknownName("codec", codec, (*LADDERED, *RIVALS, *plugins.names(), STUDIED))
    conditioning = "" if conditioning == "none" else conditioning
    bits = (params.bits, params.v_bits) if has_bits(codec) else (None, None)
    return ladder_recipe(codec, bits[0], conditioning, params, bits[1])
