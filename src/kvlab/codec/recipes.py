"""A recipe from the name of a codec and its bits, as a person types it; no params.yaml is asked. Torch-free."""

from __future__ import annotations

from pydantic import ValidationError

from kvlab.codec.names import UNSTORED
from kvlab.core.errors import CapabilityError, ParamsError, UnknownName
from kvlab.core.plugins import names, plugin_stream, settings_of
from kvlab.core.recipe import STREAMS, Recipe, StreamRecipe
from kvlab.core.rivals import RIVALS, rival_recipe
from kvlab.core.rungs import ASKED_AS_RIVALS, own_settings

CONDITIONS = {
    "": {},
    "center": {"center": True},
    "center+whiten": {"center": True, "whiten": True},
    "center+weigh": {"center": True, "weigh": True},
}


def named_recipe(codec: str, bits: float | None = None, v_bits: float | None = None, **settings) -> Recipe:
    """The recipe that codes K and V with one codec.

    Parameters
    ----------
    codec : str
        A codec, which may have mean removal and whitening of K in front of it: ``klt``, ``hadamard``,
        ``int+center``, ``int+center+whiten``, ``int+center+weigh``; one as published (`base.rivals`), such as
        ``kivi-paper``; or one of another package, by its name.
    bits, v_bits : float, optional
        Of K, and of V where they differ. A codec without a choice, such as ``fp8``, takes none.
    **settings
        Other settings of the codec, for K and V alike, such as ``block_size=64``.

    Raises
    ------
    UnknownName
        No codec has that name, or nothing that may stand in front of one.
    ParamsError
        Bits or settings that the codec does not have, or bits that it needs and that are not given.
    CapabilityError
        It is a control of measurements, which stores nothing, or ``block``, which is described in params.yaml.
    """
    name, _, condition = codec.partition("+")
    if codec in RIVALS:
        return rival_recipe(codec, bits, v_bits, **settings)
    others = names()  # first of all: a package that takes one of kvlab's names is refused
    if name not in STREAMS and name not in others:
        kept = (known for known in STREAMS if known not in (*UNSTORED, *ASKED_AS_RIVALS, "block"))
        raise UnknownName("codec", name, (*kept, *RIVALS, *others))
    if name in ASKED_AS_RIVALS:
        published = next(rival for rival in RIVALS if rival.startswith(name))
        raise CapabilityError(f"codec {name!r} has one recipe, the published one; name {published}")
    if name in UNSTORED:
        raise CapabilityError(f"codec {name!r} is a control of measurements and stores nothing; name a codec")
    if name == "block":
        raise CapabilityError("codec 'block' has no settings but those of a params.yaml; write it with kvlab recipe")
    if condition not in CONDITIONS:
        raise UnknownName("what stands in front of a codec", condition, filter(None, CONDITIONS))
    field = settings_of(name).model_fields.get("bits")
    has_bits = field is not None
    if has_bits and bits is None and (v_bits is not None or field.is_required()):
        raise ParamsError(f"codec {name!r} needs bits; give for example bits=4")
    if not has_bits and (bits, v_bits) != (None, None):
        raise ParamsError(f"codec {name!r} has no choice of bits; leave them out")
    given = has_bits and bits is not None  # another package's codec may have bits by default
    k, v = ({"bits": bits}, {"bits": bits if v_bits is None else v_bits}) if given else ({}, {})
    of_k, of_v = own_settings(name, bits, v.get("bits"))
    k |= of_k | CONDITIONS[condition] | settings
    v |= of_v | {front: True for front in CONDITIONS[condition] if front != "whiten"}
    return Recipe(k=stream_recipe(name, **k), v=stream_recipe(name, **(v | settings)))


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
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        known = ", ".join(name for name in STREAMS[codec].model_fields if name != "codec") or "none"
        raise ParamsError(f"codec {codec!r}: {where}: {problem['msg']}; its settings: {known}") from None
