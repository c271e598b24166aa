"""What an engine says of its cache: formats, the line that asks for one, what K, V and layers may have of their own."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.codecs.recipes import named_recipe
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.recipe import Recipe

DEVICES = ("cuda", "rocm", "cpu", "metal")
EXACT = "16 bits"
"""In the place of a codec: K or V as the engine holds them without a format."""


@dataclass(frozen=True)
class CacheFormat:
    """A setting of an engine's cache.

    Parameters
    ----------
    name : str
        As people call it.
    k, v : str
        The codecs that store K and V just so, by kvlab's names: that of the format if empty, `EXACT` for none.
    option : str
        What the engine's line says of it; its name if empty.
    devices : tuple of str
        Kinds of device on which the engine takes it.
    needs : str
        What else it takes: a processor, a build, a calibrated checkpoint.
    multiple : int
        Of which the head size has to be.
    exact_ends : int
        Layers at either end that the engine leaves in 16 bits by itself.
    apart : bool
        Whether single layers may be left in 16 bits by the engine's line.
    line, held, unmeasured : str
        In the place of the engine's, where they are of this format alone.
    """

    name: str
    k: str = ""
    v: str = ""
    option: str = ""
    devices: tuple[str, ...] = ("cuda", "rocm")
    needs: str = ""
    multiple: int = 1
    exact_ends: int = 0
    apart: bool = False
    line: str = ""
    held: str = ""
    unmeasured: str = ""

    @property
    def recipe(self) -> Recipe:
        """The recipe that stores K and V so, K after its rotary embedding."""
        k, v = (
            IdentityStream() if name == EXACT else getattr(named_recipe(name or self.name), stream)
            for stream, name in (("k", self.k), ("v", self.v))
        )
        return Recipe(k=k, v=v, rotary="after")

    def left_alone(self, layers: int) -> tuple[int, ...]:
        """The layers at both ends that the engine leaves in 16 bits by itself, at most half at either end."""
        ends = min(self.exact_ends, layers // 2)
        return tuple(layer for layer in range(layers) if layer < ends or layer >= layers - ends)


@dataclass(frozen=True)
class OwnFormat(CacheFormat):
    """One of kvlab's own codecs in an engine that can take it; K is coded before its rotary embedding.

    Parameters
    ----------
    codec : str
    bits : int
        Per value of K and of V.
    place : str
        Where the engine holds it, as `kvlab.measure.places.ABLE` names it.
    """

    codec: str = ""
    bits: int = 0
    place: str = ""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the codec at these bits."""
        return named_recipe(self.codec, self.bits)


@dataclass(frozen=True)
class ServingEngine:
    """An engine that people serve models with.

    Parameters
    ----------
    name, version : str
        The version whose rules these are.
    formats : tuple of CacheFormat
    line : str
        What is typed, with ``{model}``, ``{option}`` and ``{skipped}``; that of a format may name ``{fitted}``, what
        `kvlab calibrate` is told of the calibration that was measured.
    skipped : str
        Of the line, what leaves ``{layers}`` in 16 bits; empty where the engine cannot.
    as_read : {"in_forward", "snapshot"}
        Whether the tokens of a prompt already read coded K and V, or only what comes after it does.
    held : str
        What the formats were held against.
    unmeasured : str
        What of this engine no measurement here has seen.
    sources : tuple of str
        Where all of this stands.
    plain : str
        What the line says of a cache without a format.
    """

    name: str
    version: str
    formats: tuple[CacheFormat, ...]
    line: str
    as_read: str
    held: str
    unmeasured: str
    sources: tuple[str, ...]
    plain: str
    skipped: str = ""

    def told(self, model: str, format: CacheFormat | None, skipped: tuple[int, ...] = (), fitted: str = "") -> str:
        """The line to paste; `skipped` are the layers to leave in 16 bits, None of a format is none."""
        option = self.plain if format is None else format.option or format.name
        left = self.skipped.format(layers=" ".join(map(str, skipped))) if skipped else ""
        line = format.line if format and format.line else self.line
        return line.format(model=model, option=option, skipped=left, fitted=fitted)

    def refused(self, format: CacheFormat, device: str, layers: int, head_dim: int) -> str | None:
        """Why a model of so many layers and this head size cannot have the format on a device; None where it can."""
        if device not in format.devices:
            return f"{self.name} takes it on {' and '.join(format.devices)}, not on {device}"
        if head_dim % format.multiple:
            return f"{self.name} takes it where {format.multiple} divides the head size, which is {head_dim}"
        if len(format.left_alone(layers)) == layers:
            return f"{self.name} leaves all {layers} layers in 16 bits"
        return None
