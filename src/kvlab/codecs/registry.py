"""Codecs by name; a codec's module is imported when it is first built."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvlab.codecs import plugins
from kvlab.codecs.base import Codec, StreamCalibration
from kvlab.codecs.catalogue import TENSORWISE
from kvlab.codecs.shared.ended_codec import EndedCodec
from kvlab.codecs.shared.exact_tokens import ExactTokens
from kvlab.core.errors import CapabilityError, PluginError, UnknownName
from kvlab.core.recipe import CODECS, WHOLE, PluginStream, StreamRecipe

PARTS = ("per_token", "encode", "decode", "decode_block")  # of `Codec`


def build(stream_recipe: StreamRecipe, calibration: StreamCalibration | None = None) -> Codec:
    """The codec of one stream, for whole caches: where the recipe keeps tokens at the ends, it does.

    Parameters and what is raised are those of `bare`.
    """
    codec, kept = bare(stream_recipe, calibration), ExactTokens.of(stream_recipe)
    return EndedCodec(codec, kept) if kept else codec


def bare(stream_recipe: StreamRecipe, calibration: StreamCalibration | None = None) -> Codec:
    """The codec of one stream alone, for whoever keeps the tokens at the ends of a growing cache by itself.

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
    CapabilityError
        When it codes whole caches.
    PluginError
        When it is of another package, which is not installed, of another version, or broken.
    CalibrationMismatch
        When the recipe asks for a fitted codebook that `calibration` does not hold.
    """
    if isinstance(stream_recipe, PluginStream):
        found, settings = plugins.installed(stream_recipe)
        return _plugin_class(found)(settings, calibration)
    return codec_class(stream_recipe.codec)(stream_recipe, calibration)


def class_of(stream_recipe: StreamRecipe) -> type[Codec]:
    """The class that `bare` takes; raises as it does."""
    if isinstance(stream_recipe, PluginStream):
        return _plugin_class(plugins.installed(stream_recipe)[0])
    return codec_class(stream_recipe.codec)


def codec_class(name: str) -> type[Codec]:
    """The class of kvlab's own codec of this name; `UnknownName` when none has it."""
    if name in WHOLE:
        raise CapabilityError(
            f"codec {name!r} codes all layers of a cache at once, and here tensors are coded one by one; name another:"
            f" {', '.join(TENSORWISE)}",
            code="capability.whole-cache",
        )
    if name not in CODECS:
        raise UnknownName("codec", name, TENSORWISE)
    module, class_name = CODECS[name].codec.split(":")
    return getattr(import_module(module), class_name)


def fit_class(name: str) -> Any:
    """What a codec of kvlab's fits by itself: the class `Fit` of its module, with `of` and `shape`."""
    return import_module(CODECS[name].codec.split(":")[0]).Fit


def _plugin_class(found: plugins.FoundPlugin) -> type[Codec]:
    """The class of another package's codec; `PluginError` when it lacks what every codec has."""
    codec = plugins.load_class(found)
    if missing := [name for name in PARTS if not hasattr(codec, name)]:
        raise PluginError(f"{found.origin}: {found.plugin.codec} has no {missing[0]!r}, which every codec has")
    return codec
