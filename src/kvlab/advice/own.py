"""kvlab's own codecs among the formats of engines that can take them."""

from __future__ import annotations

from kvlab.advice.serving import OwnFormat

WIDTHS = (("klt", 4), ("klt", 3), ("klt", 2), ("hadamard", 4))
FITTED = "kvlab calibrate --model {{model}} --codec {codec} --bits {bits}{{fitted}} --out {name}.kv"
HELD = "its own bytes: what was measured is the codec that the engine runs"


def own_formats(place: str, line: str, devices: tuple[str, ...], needs: str, unmeasured: str) -> tuple[OwnFormat, ...]:
    """The codecs in one place of an engine.

    Parameters
    ----------
    place : str
        See `OwnFormat`.
    line : str
        What is typed once `kvlab calibrate` has written the file, with ``{file}`` and, twice bracketed, ``{{model}}``.
    devices, needs, unmeasured
        See `CacheFormat`.
    """
    return tuple(
        OwnFormat(
            name := f"{codec}-{bits}",
            devices=devices,
            needs=needs,
            line=FITTED.format(codec=codec, bits=bits, name=name) + line.format(file=f"{name}.kv"),
            held=HELD,
            unmeasured=unmeasured,
            codec=codec,
            bits=bits,
            place=place,
        )
        for codec, bits in WIDTHS
    )
