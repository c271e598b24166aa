"""What is held against one another: every arm by its name, its family and its settings. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor
from typing import Literal

from kvlab.attention.named import PLACE, Mechanism, mechanism, numbered
from kvlab.codecs.recipes import named_recipe
from kvlab.core.params import Params
from kvlab.core.recipe import Recipe
from kvlab_pipeline.studies.tradeoffs.params import Tradeoffs

Family = Literal["codec", "eviction", "latent", "sparse reading", "codec x sparse reading", "latent x codec"]
FULL = 16  # bits of a number that no codec codes
BYTE = 8  # bits


@dataclass(frozen=True)
class TradeoffVariant:
    """One way to make a cache cheaper.

    Parameters
    ----------
    name : str
        For people, unlike all others.
    family : str
    recipe : Recipe or None
        Of K and V; of latents its K stream. None: 16 bits.
    asked : Mechanism or None
        A pattern, a latent cache or an eviction.
    """

    name: str
    family: Family
    recipe: Recipe | None = None
    asked: Mechanism | None = None


@dataclass(frozen=True)
class CacheShape:
    """What of a model decides bytes: layers, KV heads and dimensions of each, and tokens of the context."""

    layers: int
    kv_heads: int
    head_dim: int
    context: int

    @property
    def numbers(self) -> int:
        """K and V of a token in one layer."""
        return 2 * self.kv_heads * self.head_dim


def arms(params: Params, shape: CacheShape) -> list[TradeoffVariant]:
    """Codecs first, in the order of pages."""
    return [*_codecs(params), *_evictions(params.tradeoffs, shape), *_latents(params, shape), *_sparse(params)]


def recipes_of(params: Params) -> list[Recipe]:
    """All codecs that run, those that draft among them; which they are hangs on no model."""
    settings = params.tradeoffs
    made = [*_codecs(params), *_sparse(params)]
    coding = [(settings.latent_codec, bits) for bits in settings.combined]
    coding += [(codec, bits) for codec in settings.drafters for bits in settings.combined]
    return [arm.recipe for arm in made if arm.recipe] + [named_recipe(*one, params=params) for one in coding]


def kept_at(budget: float, policy: str, shape: CacheShape) -> int:
    """Tokens that fit into so many bits per value of the context, their numbers included where a policy needs them."""
    token = FULL * shape.numbers + BYTE * PLACE * numbered(policy)
    return max(1, min(shape.context, floor(budget * shape.numbers * shape.context / token)))


def rank_at(budget: float, sinks: int, shape: CacheShape) -> int:
    """Numbers of a latent in 16 bits that fit beside `sinks` whole tokens."""
    tokens = shape.context - sinks
    room = budget * shape.numbers * shape.context / FULL - sinks * shape.numbers
    return max(1, min(shape.numbers, floor(room / tokens)))


def _codecs(params: Params) -> Iterator[TradeoffVariant]:
    settings = params.tradeoffs
    for codec in settings.codecs:
        for bits in settings.bits if codec == settings.codecs[0] else settings.rival_bits:
            yield TradeoffVariant(f"{codec} {bits}", "codec", named_recipe(codec, bits, params=params))


def _evictions(settings: Tradeoffs, shape: CacheShape) -> Iterator[TradeoffVariant]:
    for policy in settings.policies:
        for kept in dict.fromkeys(kept_at(budget, policy, shape) for budget in settings.budgets):
            last = f",recent={settings.recent}" if numbered(policy) else ""
            asked = mechanism(f"{policy}:kept={kept},sinks={settings.sinks}{last}")
            yield TradeoffVariant(f"{policy}, {kept} of {shape.context} tokens", "eviction", asked=asked)


def _latents(params: Params, shape: CacheShape) -> Iterator[TradeoffVariant]:
    settings, codec = params.tradeoffs, params.tradeoffs.latent_codec
    for rank in dict.fromkeys(rank_at(budget, settings.sinks, shape) for budget in settings.budgets):
        asked = mechanism(f"latent:rank={rank},sinks={settings.sinks}")
        yield TradeoffVariant(f"latent of {rank}", "latent", asked=asked)
    rank = max(1, round(settings.latent_share * shape.numbers))
    asked = mechanism(f"latent:rank={rank},sinks={settings.sinks}")
    for bits in settings.combined:
        recipe = named_recipe(codec, bits, params=params)
        yield TradeoffVariant(f"latent of {rank}, {codec} {bits}", "latent x codec", recipe, asked)


def _sparse(params: Params) -> Iterator[TradeoffVariant]:
    settings = params.tradeoffs
    for name in settings.sparse:
        yield TradeoffVariant(name, "sparse reading", asked=mechanism(name))
    for bits in settings.combined if settings.sparse else ():
        codec, name = settings.codecs[0], settings.sparse[0]
        recipe = named_recipe(codec, bits, params=params)
        yield TradeoffVariant(f"{name}, {codec} {bits}", "codec x sparse reading", recipe, mechanism(name))
