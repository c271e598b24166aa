"""Where a codec can run, by the very checks of those places. Imports torch."""

from __future__ import annotations

from kvlab.cache.hf.coder import StreamCoder
from kvlab.cache.pages.exact import kept_exact
from kvlab.cache.pages.token_bytes import rows_of
from kvlab.cache.vllm.worker import refuse_mixed
from kvlab.calibration.load import Calibrated
from kvlab.codecs.base import Site
from kvlab.codecs.catalogue import UNSTORED
from kvlab.codecs.registry import bare
from kvlab.codecs.stream.bitstream import STREAMS
from kvlab.core.errors import UserError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import WHOLE, Recipe
from kvlab.engines import capability

CACHE, PAGES, STORE = "Cache", "vLLM pages", "store"
"""The Cache of transformers, vLLM's pages (`KVLAB_PAGES`), files of a finished cache."""


def places(recipe: Recipe, calibrated: Calibrated | None, info: ModelInfo) -> tuple[str, ...]:
    """Where a recipe can run, by the very checks of those places on layer 0 of this model's shape.

    What else a place asks of a model (a rotary embedding that can be turned back) is told when it is made.
    """
    found = []
    for place, able in ABLE.items():
        try:
            able(recipe, calibrated, info)
        except UserError:
            continue
        found.append(place)
    return (*found, *((STORE,) if _stored(recipe) else ()))


def codec_of(recipe: Recipe, stream: str, calibrated: Calibrated | None):
    """The codec of a stream with what was fitted for it."""
    own = getattr(recipe, stream)
    return bare(own, calibrated.stream(own, stream, recipe.placement) if calibrated else None)


def _in_cache(recipe: Recipe, calibrated: Calibrated | None, info: ModelInfo) -> None:
    for stream in STREAMS:
        codec = codec_of(recipe, stream, calibrated)
        StreamCoder(codec, getattr(recipe, stream), Site(0, 0, stream), info.n_kv_heads, info.head_dim)


def _in_pages(recipe: Recipe, calibrated: Calibrated | None, info: ModelInfo) -> None:
    refuse_mixed(recipe, "the recipe")
    kept_exact(recipe, "the recipe")
    capability.check("vllm", "bfloat16", "default", info)
    capability.check_pages(info)
    for stream in STREAMS:
        rows_of(codec_of(recipe, stream, calibrated), Site(0, 0, stream), info.n_kv_heads, info.head_dim)


ABLE = {CACHE: _in_cache, PAGES: _in_pages}
"""By place: raises `UserError` where a recipe cannot run there."""


def _stored(recipe: Recipe) -> bool:
    """Whether `kvlab encode` writes it: of the codecs that see a whole cache only `archive` has files."""
    names = {recipe.k.codec, recipe.v.codec}
    return not names & {*UNSTORED} and names & {*WHOLE} <= {"archive"}
