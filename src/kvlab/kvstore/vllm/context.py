"""Whose K and V an engine of vLLM holds, and which engines' K and V cannot be told apart well enough to be saved."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvlab.cache.files.prepared import Prepared, at_bits, prepared
from kvlab.cache.files.recipe import read_recipe_file
from kvlab.cache.hf.rope import turns_of
from kvlab.core.decoder import rope_of, rope_types
from kvlab.core.errors import CapabilityError
from kvlab.core.model import ModelInfo, layer_count, locate, resolve
from kvlab.core.params import Model, ModelEntry
from kvlab.core.recipe import RECIPE_VARIABLE, canonical
from kvlab.kvstore.paging.geometry import named
from kvlab.kvstore.snapshot.identity import ROPE_FIELDS, ContextIdentity, identity_of
from kvlab.kvstore.snapshot.payload import ChunkCoder, recipe_coder
from kvlab.kvstore.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PLAIN_FORMATS = ("auto", "hf", "safetensors")  # of weights: those that read the files of the identity's hash
MOVING_ROPE = ("dynamic", "longrope")  # the angle of a position depends on the length that the engine allows


@dataclass(frozen=True)
class EngineContext:
    """What both halves of the connector know of their engine.

    Parameters
    ----------
    settings : Settings
    identity : ContextIdentity
        Of a request that brings no salt of its own.
    block_tokens : int
        Tokens of a block of vLLM's paged cache.
    made : dict of str to str
        What a manifest says of the engine.
    coder : ChunkCoder or None
        How K and V are stored; None as they are.
    """

    settings: ConnectorSettings
    identity: ContextIdentity
    block_tokens: int
    made: dict[str, str]
    coder: ChunkCoder | None = None

    def identity_for(self, request_salt: str | None) -> ContextIdentity:
        """The identity of a request's context; vLLM's ``cache_salt`` keeps contexts apart here too."""
        if not request_salt:
            return self.identity
        salt = canonical({"engine": self.identity.salt, "request": request_salt})
        return self.identity.model_copy(update={"salt": salt})


def salt_of(settings: ConnectorSettings) -> str:
    """The salt that keeps this engine's K and V apart from other engines', unless they are to be shared.

    A snapshot promises that a warm run is the cold run. Between engines, and between their devices, that does not
    hold: the same tokens have K and V that agree up to rounding. `ContextIdentity` knows of the model and not of the
    engine, so that it is the salt that says it, and transformers refuses what vLLM saved, and the other way round.
    """
    if settings.across_engines:
        return settings.salt
    return canonical({"engine": "vllm", "device": current_platform.device_type, "salt": settings.salt})


def context_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings) -> EngineContext:
    """What an engine of this configuration holds.

    Raises
    ------
    CapabilityError
        When its cache is not a whole prefix of plain K and V on the CPU, or not the K and V of the model's files.
    ModelError
        When the model has no tokenizer, or its architecture is none of `kvlab.core.model`.
    UserError
        When the recipe of the settings cannot be read, or is not for this model.
    """
    reasons = [*_of_engine(vllm_config), *_of_model(vllm_config.model_config), *_of_cache(kv_cache_config)]
    if reasons:
        lines = "; ".join(line for _, line in reasons)
        raise CapabilityError(f"snapshots cannot be used here: {lines}", code=reasons[0][0])
    spec, config = kv_cache_config.kv_cache_groups[0].kv_cache_spec, vllm_config.model_config
    rope = canonical(rope_of(config.hf_config.to_dict()))
    identity = _identity(
        str(config.model), config.revision, named(config.dtype), settings.chunk_tokens, rope, salt_of(settings)
    )
    geometry = identity.geometry
    found = (len(kv_cache_config.kv_cache_groups[0].layer_names), spec.num_kv_heads, spec.head_size, named(spec.dtype))
    said = (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.dtype)
    if found != said:
        raise CapabilityError(
            f"snapshots cannot be used here: vLLM's cache has layers, KV heads, head size and dtype {found},"
            f" the model {said}; leave kv_cache_dtype at auto",
            code="capability.cache-shape",
        )
    coder = _coder(settings, config, identity)
    made = {
        "engine": "vllm",
        "device": f"{current_platform.device_type} {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "block_tokens": str(spec.block_size),
        "across_engines": "yes" if settings.across_engines else "no",
    }
    return EngineContext(settings, identity.coded(coder.codec if coder else None), spec.block_size, made, coder)


def _coder(settings: ConnectorSettings, config: ModelConfig, identity: ContextIdentity) -> ChunkCoder | None:
    """What the settings' recipe stores K and V by."""
    if not settings.recipe:
        return None
    ready = _prepared(settings.recipe, settings.bits, str(config.model), config.revision)
    turns = turns_of(config.hf_config, identity.geometry.head_dim, config.max_model_len, config.dtype)
    return recipe_coder(identity.geometry, ready.recipe, ready.calibration, ready.layers, turns=turns)


@lru_cache(maxsize=4)
def _prepared(recipe: str, bits: float | None, model: str, revision: str | None) -> Prepared:
    """Read once for both halves."""
    return at_bits(prepared(read_recipe_file(recipe), _info(model, revision), whole=True), bits)


def _of_engine(config: VllmConfig) -> Iterator[tuple[str, str]]:
    if os.environ.get(RECIPE_VARIABLE):
        line = f"{RECIPE_VARIABLE} is set, so the cache holds coded K and V and not the model's; unset it"
        yield "capability.coded-twice", line
    if current_platform.device_type != "cpu":
        line = f"the cache lies on {current_platform.device_type}; the connector is made for vLLM on the CPU"
        yield "capability.device", line
    if config.parallel_config.world_size != 1:
        line = f"the model is split over {config.parallel_config.world_size} processes, each with a part of K and V"
        yield "capability.processes", line
    if (form := str(config.load_config.load_format)) not in PLAIN_FORMATS:
        allowed = ", ".join(PLAIN_FORMATS)
        line = f"weights of load_format {form} need not be those of the model's files; allowed: {allowed}"
        yield "capability.load-format", line
    if config.speculative_config is not None:
        yield "capability.speculation", "with speculative decoding, K and V of rejected tokens lie in the cache"


def _of_model(config: ModelConfig) -> Iterator[tuple[str, str]]:
    if config.quantization is not None:
        line = f"the weights are quantised ({config.quantization}), which a snapshot's identity does not know of"
        yield "capability.quantised", line
    overrides = config.hf_overrides
    if callable(overrides):
        yield "capability.overrides-function", "hf_overrides is a function, and what it does to K and V cannot be said"
    elif others := sorted(set(overrides) - set(ROPE_FIELDS)):
        line = f"hf_overrides changes {', '.join(others)}, which a snapshot's identity takes from config.json"
        yield "capability.overrides", line
    if moving := rope_types(rope_of(config.hf_config.to_dict())) & set(MOVING_ROPE):
        line = (
            f"the rotary embedding is {min(moving)}, whose angles depend on the longest context that the engine allows"
        )
        yield "capability.moving-rope", line


def _of_cache(config: KVCacheConfig) -> Iterator[tuple[str, str]]:
    groups = config.kv_cache_groups
    if len(groups) != 1:
        line = f"the cache has {len(groups)} groups of layers; only a model of full-attention layers alone is supported"
        yield "capability.cache-groups", line
        return
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        yield "capability.layer-kinds", f"the layers keep {type(spec).__name__} and not K and V of all tokens"
    elif spec.sliding_window is not None or spec.attention_chunk_size is not None:
        yield "capability.window", "the layers attend to a window only"


@lru_cache(maxsize=4)
def _identity(model: str, revision: str | None, dtype: str, chunk_tokens: int, rope: str, salt: str) -> ContextIdentity:
    """Made once for both halves: the files of the model are read for it."""
    return identity_of(_info(model, revision), dtype, chunk_tokens, rope=json.loads(rope), salt=salt)


def _info(model: str, revision: str | None) -> ModelInfo:
    folder = locate(Model(path=model, revision=revision, n_layers=1))
    layers = layer_count(ModelEntry(path=str(folder)))
    return resolve(Model(path=str(folder), n_layers=layers), loads=False)
