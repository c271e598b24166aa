"""What compressing an LLM's KV cache costs, on which engine, and why: the library and its command line."""

from __future__ import annotations

from importlib import import_module
from time import time

BEGAN = time()  # seconds since the epoch: before any other module of this package was read

PUBLIC = {
    "Cache": "kvlab.cache.transformers_cache:Cache",
    "recipe": "kvlab.codecs.recipes:named_recipe",
    "Recipe": "kvlab.core.recipe:Recipe",
    # for packages that bring a codec (docs/codecs.md)
    "Plugin": "kvlab.core.codec_settings:Plugin",
    "Conditioned": "kvlab.core.codec_settings:Conditioned",
    "Frozen": "kvlab.core.codec_settings:Frozen",
    "TokenBlockCodec": "kvlab.codecs.shared.token_blocks:TokenBlockCodec",
    "Stats": "kvlab.codecs.base:Stats",
    "stored": "kvlab.codecs.base:stored",
    "finite": "kvlab.codecs.base:finite",
}
"""Where the public names are; each module is imported when its name is first used, so that `kvlab` itself is light."""

__all__ = sorted(PUBLIC)


def __getattr__(name: str):
    """A public name, from its module."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}; public names: {', '.join(__all__)}")
    module, _, own = PUBLIC[name].partition(":")
    return getattr(import_module(module), own)


def __dir__() -> list[str]:
    """The public names, and what every module has."""
    return [*globals(), *__all__]
