"""Codecs by name; a codec's module is imported when it is first built."""

from __future__ import annotations

from importlib import import_module

from kvlab.codec.base import Codec, StreamCalibration
from kvlab.codec.names import CODECS
from kvlab.errors import UnknownName
from kvlab.recipe import StreamRecipe


def build(stream_recipe: StreamRecipe, calibration: StreamCalibration | None = None) -> Codec:
    """The codec of one stream.

    Parameters
    ----------
    stream_recipe : StreamRecipe
        Its `codec` names the class, the rest of it are the settings.
    calibration : StreamCalibration or None
        Whiteners and codebook, for recipes that ask for them.

    Raises
    ------
    UnknownName
        When no codec has the name.
    CalibrationMismatch
        When the recipe asks for a fitted codebook that `calibration` does not hold.
    """
    return codec_class(stream_recipe.codec)(stream_recipe, calibration)


def codec_class(name: str) -> type[Codec]:
    """The class that has this name; `UnknownName` when none has it."""
    if name not in CODECS:
        raise UnknownName("codec", name, CODECS)
    module, class_name = CODECS[name].split(":")
    return getattr(import_module(module), class_name)
