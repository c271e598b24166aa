"""Codecs of other packages, found by their entry points in the group ``kvlab.codecs``. Torch-free.

    [project.entry-points."kvlab.codecs"]
    sign = "kvlab_sign:PLUGIN"

What an entry point leads to is a `Plugin`: the codec's settings, and where its class is, which is imported when a
codec is built and not before. `kvlab.codecs.testing` checks one for everything that kvlab relies on.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from pydantic import ValidationError

from kvlab.core.codec_settings import Frozen, Plugin
from kvlab.core.errors import ParamsError, PluginError, UnknownName
from kvlab.core.recipe import STREAMS, PluginStream

GROUP = "kvlab.codecs"
OURS = tuple(PluginStream.model_fields)  # what a recipe says of a codec besides its settings


class FoundPlugin(NamedTuple):
    """A plugin and the distribution that it came with."""

    name: str
    package: str
    version: str
    plugin: Plugin

    @property
    def origin(self) -> str:
        """Codec and package in words."""
        return f"codec {self.name!r} of package {self.package} {self.version}"


def names() -> tuple[str, ...]:
    """The names of the codecs of other packages; nothing of them is imported.

    Raises
    ------
    PluginError
        A name is one of kvlab's own, or two packages bring it.
    """
    return tuple(sorted(_installed(tuple(sys.path))))


def find(name: str) -> FoundPlugin:
    """The plugin of this name.

    Raises
    ------
    UnknownName
        No installed package brings it.
    PluginError
        The package is broken, or its name is one that is taken.
    """
    known = _installed(tuple(sys.path))
    if name not in known:
        raise UnknownName("codec", name, (*STREAMS, *known))
    return _loaded(known[name], tuple(sys.path))


def plugin_stream(name: str, **settings) -> PluginStream:
    """The recipe of one stream, all settings in it; `ParamsError` for one that the codec does not know."""
    found = find(name)
    own = _settings(found, settings)
    return PluginStream(
        codec=name,
        package=found.package,
        version=found.version,
        reads=found.plugin.reads,
        **own.model_dump(mode="json"),
    )


def installed(stream: PluginStream) -> tuple[FoundPlugin, Frozen]:
    """The plugin that a stream's recipe was written for, and its settings.

    Raises
    ------
    UnknownName, PluginError
        It is not installed, in another version, or broken; or the recipe is not one that it writes.
    ParamsError
        A setting that it does not know.
    """
    if stream.codec not in names():
        raise PluginError(
            f"codec {stream.codec!r} is of package {stream.package} {stream.version}, which is not installed here",
            code="plugin.not-installed",
        )
    found = find(stream.codec)
    if (found.package, found.version) != (stream.package, stream.version):
        raise PluginError(
            f"the recipe is of codec {stream.codec!r} of package {stream.package} {stream.version}, installed is"
            f" {found.package} {found.version}; install that version, or make the recipe again",
            code="plugin.other-version",
        )
    own = _settings(found, stream.settings)
    if own.model_dump(mode="json") != stream.settings or found.plugin.reads != stream.reads:
        raise PluginError(
            f"the recipe of {found.origin} leaves out what it has by default; make it again",
            code="plugin.incomplete-recipe",
        )
    return found, own


def settings_of(name: str) -> type[Frozen]:
    """The settings of a codec, kvlab's own or another package's."""
    return STREAMS[name] if name in STREAMS else find(name).plugin.settings


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Entry points by name; `path` is what Python looks for packages in."""
    known: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in STREAMS:
            raise PluginError(
                f"package {_package(point)} brings a codec {point.name!r}, which is kvlab's own name; rename it there,"
                " or uninstall the package",
                code="plugin.name-taken",
            )
        if point.name in known:
            raise PluginError(
                f"packages {_package(known[point.name])} and {_package(point)} both bring a codec {point.name!r};"
                " uninstall one",
                code="plugin.name-twice",
            )
        known[point.name] = point
    return known


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "(unknown)"


@lru_cache
def _loaded(point: EntryPoint, path: tuple[str, ...]) -> FoundPlugin:
    """What an entry point leads to, which must be a plugin; `path` as above."""
    where = f"codec {point.name!r} of package {_package(point)}"
    try:
        plugin = point.load()
    except Exception as error:  # whatever another package does when it is imported
        raise PluginError(
            f"{where} cannot be loaded from {point.value}: {_first_line(error)}", code="plugin.not-loaded"
        ) from None
    if not isinstance(plugin, Plugin):
        raise PluginError(
            f"{where}: {point.value} is a {type(plugin).__name__}, no kvlab.Plugin", code="plugin.other-class"
        )
    if not (isinstance(plugin.settings, type) and issubclass(plugin.settings, Frozen)):
        raise PluginError(f"{where}: its settings are no subclass of kvlab.Conditioned or kvlab.Frozen")
    if not isinstance(plugin.reads, tuple):
        raise PluginError(f"{where}: its reads are no tuple; a recipe has to hold them", code="plugin.computed-reads")
    if taken := [name for name in OURS if name in plugin.settings.model_fields]:
        raise PluginError(
            f"{where}: the name of its setting {taken[0]!r} is taken; not allowed: {', '.join(OURS)}",
            code="plugin.setting-taken",
        )
    return FoundPlugin(point.name, _package(point), point.dist.version if point.dist else "0", plugin)


def load_class(found: FoundPlugin) -> type:
    """The codec's class; `PluginError` when it cannot be imported."""
    module, _, name = found.plugin.codec.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # as above
        raise PluginError(
            f"{found.origin} cannot be loaded from {found.plugin.codec}: {_first_line(error)}", code="plugin.not-loaded"
        ) from None


def _settings(found: FoundPlugin, given: dict) -> Frozen:
    try:
        return found.plugin.settings(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "settings"
        known = ", ".join(found.plugin.settings.model_fields)
        raise ParamsError(f"{found.origin}: {where}: {problem['msg']}; its settings: {known}") from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
