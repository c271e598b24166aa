"""The recipes that are measured side by side: every codec at the same bits, conditioned or not. Torch-free."""

from __future__ import annotations

from typing import Literal, get_args

from kvlab.errors import ParamsError, UnknownName
from kvlab.params import Conditionable, Laddered, Params, studied_recipe
from kvlab.recipe import (
    Conditioned,
    D4Stream,
    E8Stream,
    Fp8Stream,
    HadamardStream,
    IntStream,
    KiviStream,
    KltStream,
    OscarStream,
    Recipe,
)

Conditioning = Literal["", "center", "center+whiten"]

WITH_BITS: dict[str, type[Conditioned]] = {
    "int": IntStream,
    "hadamard": HadamardStream,
    "d4": D4Stream,
    "e8": E8Stream,
}

UNCLIPPED = 4  # bits from which OSCAR's clipping (.96 of K and .92 of V, meant for 2 bits) costs more than it gains


def default_recipe(params: Params) -> Recipe:
    """What the drop-ins run when they are told no other: `klt` at the bits of params.yaml."""
    return Recipe(k=KltStream(bits=params.bits), v=KltStream(bits=params.v_bits))


def ladder_recipe(codec: Laddered, bits: int | None, conditioning: Conditioning, params: Params) -> Recipe:
    """The recipe of one rung: the same bits for K and V.

    Parameters
    ----------
    codec : str
        A name of `Laddered`.
    bits : int or None
        None for `fp8`, which has 8 and no choice.
    conditioning : str
        Empty; ``center``, which removes the calibrated mean of K and of V; or ``center+whiten``, which
        whitens K as well.
    params : Params
        `codec` and `calibration` describe the `block` rung, which is the studied recipe on the Gaussian table.

    Raises
    ------
    UnknownName
        No rung has that name, or no conditioning.
    ParamsError
        The codec cannot be conditioned (it brings its own), or takes no bits or needs some.
    """
    if codec not in get_args(Laddered):
        raise UnknownName("codec of the ladder", codec, get_args(Laddered))
    if conditioning not in get_args(Conditioning):
        raise UnknownName("conditioning", conditioning, get_args(Conditioning))
    if conditioning and codec not in get_args(Conditionable):
        raise ParamsError(f"codec {codec!r} cannot be conditioned; allowed: {', '.join(get_args(Conditionable))}")
    if (bits is None) != (codec == "fp8"):
        raise ParamsError(f"codec {codec!r} at bits {bits}: fp8 takes no bits, every other codec needs them")
    if codec == "klt":
        return Recipe(k=KltStream(bits=bits), v=KltStream(bits=bits))
    if codec == "block":
        return _block(bits, params)
    v = {"center": bool(conditioning)}
    k = v | {"whiten": conditioning.endswith("whiten")}
    if codec == "kivi":
        return Recipe(k=KiviStream(bits=bits, axis="channel", **k), v=KiviStream(bits=bits, axis="token", **v))
    if codec == "fp8":
        return Recipe(k=Fp8Stream(**k), v=Fp8Stream(**v))
    if codec == "oscar" and bits < UNCLIPPED:
        return Recipe(k=OscarStream(bits=bits, clip=0.96, **k), v=OscarStream(bits=bits, clip=0.92, **v))
    if codec == "oscar":
        return Recipe(k=OscarStream(bits=bits, clip=1.0, **k), v=OscarStream(bits=bits, clip=1.0, **v))
    stream = WITH_BITS[codec]
    return Recipe(k=stream(bits=bits, **k), v=stream(bits=bits, **v))


def _block(bits: int, params: Params) -> Recipe:
    recipe = studied_recipe(params.model_copy(update={"bits": bits, "v_bits": bits}))
    gaussian = {"codebook": "gaussian"}  # the calibration fits tables for the bits of params.yaml only
    return Recipe(k=recipe.k.model_copy(update=gaussian), v=recipe.v.model_copy(update=gaussian))


def rungs(params: Params) -> list[tuple[str, Recipe]]:
    """(label, recipe) of every rung that ``params.ladder`` asks for, a codec's own ones together."""
    found = []
    for codec in params.ladder.codecs:
        choices: list[Conditioning] = [""]
        if codec in params.ladder.conditioned:
            choices += ["center", "center+whiten"]
        for bits in (None,) if codec == "fp8" else params.ladder.bits:
            for conditioning in choices:
                name = "+".join(filter(None, [codec, conditioning]))
                label = name if bits is None else f"{name} {bits}"
                found.append((label, ladder_recipe(codec, bits, conditioning, params)))
    return found


def labelled(name: str, params: Params) -> Recipe:
    """The rung that a person names as ``codec[+center[+whiten]]``, K at ``bits`` and V at ``v_bits``.

    Raises
    ------
    UnknownName
        No codec, or no conditioning, has that name.
    """
    codec, _, conditioning = name.partition("+")
    k, v = (
        ladder_recipe(codec, None if codec == "fp8" else bits, conditioning, params)
        for bits in (params.bits, params.v_bits)
    )
    return Recipe(k=k.k, v=v.v)
