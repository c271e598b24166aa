"""Whose K and V an engine holds, and the engines that are refused at their start."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from kvlab.core.errors import CapabilityError, ModelError
from kvlab.core.recipe import RECIPE_VARIABLE
from kvlab.kvstore.snapshot.identity import differences, identity_of
from kvlab.kvstore.vllm.settings import ConnectorSettings, transfer_config
from refusals import refused

OWN = ConnectorSettings("folder", chunk_tokens=16)
SHARED = replace(OWN, across_engines=True)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """Imported late, and after what must be set before vLLM is imported."""
    import kvlab.engines.vllm.process  # noqa: F401
    from kvlab.kvstore.vllm import context

    return context


@pytest.fixture(scope="module")
def context_of(module):
    return module.context_of


@pytest.fixture(scope="module")
def cache(module):
    """Changes of the plain cache's layers -> the cache, one group a change."""
    plain = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}

    def made(*changes, layers: int = 6, kind: str = "FullAttentionSpec"):
        from vllm.v1 import kv_cache_interface

        names = [f"model.layers.{number}.self_attn.attn" for number in range(layers)]
        specs = [getattr(kv_cache_interface, kind)(**plain | change) for change in changes or ({},)]
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s, layer_names=names) for s in specs])

    return made


@pytest.fixture
def config(reference):
    """What the connector looks at of vLLM's configuration."""
    model = SimpleNamespace(
        model=str(reference),
        revision=None,
        dtype=torch.float32,
        quantization=None,
        hf_overrides={},
        hf_config=AutoConfig.from_pretrained(reference),
    )
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(world_size=1),
        speculative_config=None,
    )


def test_a_shared_identity_is_the_one_that_transformers_has(config, info, context_of, cache):
    found = context_of(config, cache(), SHARED)
    assert found.identity == identity_of(info, "float32", 16) and found.block_tokens == 32


def test_an_identity_of_its_own_differs_by_the_salt_alone(config, info, context_of, cache):
    own = context_of(config, cache(), OWN)
    assert [str(code) for code, _ in differences(own.identity, identity_of(info, "float32", 16))] == ["salt"]
    assert '"engine":"vllm"' in own.identity.salt and '"device":"cpu"' in own.identity.salt
    assert own.made["engine"] == "vllm" and own.made["across_engines"] == "no"


def test_salts_of_settings_and_requests_never_meet(config, context_of, cache):
    salts = set()
    for settings in (OWN, SHARED, replace(OWN, salt="a"), replace(SHARED, salt="a")):
        found = context_of(config, cache(), settings)
        salts |= {found.identity_for(given).salt for given in (None, "a", "b")}
    assert len(salts) == 4 * 3


def test_an_overridden_rotary_embedding_is_another_identity(config, info, context_of, cache):
    config.model_config.hf_config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    config.model_config.hf_overrides = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    found = context_of(config, cache(), SHARED)
    assert [str(code) for code, _ in differences(found.identity, identity_of(info, "float32", 16))] == ["rope"]


def changed(config, path: str, value) -> None:
    *folders, name = path.split(".")
    for folder in folders:
        config = getattr(config, folder)
    setattr(config, name, value)


@pytest.mark.parametrize(
    ("path", "value", "code", "data"),
    [
        ("parallel_config.world_size", 2, "processes", [2]),
        ("speculative_config", object(), "speculation", []),
        ("load_config.load_format", "dummy", "load-format", ["dummy", "auto, hf, safetensors"]),
        ("load_config.load_format", "a plugin's", "load-format", ["a plugin's"]),
        ("model_config.quantization", "fp8", "quantised", ["fp8"]),
        ("model_config.hf_overrides", {"rms_norm_eps": 1.0}, "overrides", ["rms_norm_eps"]),
        ("model_config.hf_overrides", lambda config: config, "overrides-function", ["hf_overrides"]),
        (
            "model_config.hf_config.rope_parameters",
            {"rope_type": "dynamic", "rope_theta": 1e4},
            "moving-rope",
            ["dynamic"],
        ),
    ],
)
def test_engines_whose_cache_is_not_the_models_are_refused(config, context_of, cache, path, value, code, data):
    changed(config, path, value)
    with refused(CapabilityError, f"capability.{code}", *data):
        context_of(config, cache(), OWN)


@pytest.mark.parametrize(
    ("given", "layers", "code", "data"),
    [
        (({}, {}), 6, "cache-groups", "2 groups"),
        (({"sliding_window": 64},), 6, "window", ""),
        (({"dtype": torch.uint8},), 6, "cache-shape", "(6, 2, 64, 'uint8')"),
        (({"num_kv_heads": 1},), 6, "cache-shape", "(6, 1, 64, 'float32')"),
        (({},), 5, "cache-shape", "(5, 2, 64, 'float32')"),
    ],
)
def test_caches_that_hold_something_else_are_refused(config, context_of, cache, given, layers, code, data):
    with refused(CapabilityError, f"capability.{code}", data):
        context_of(config, cache(*given, layers=layers), OWN)


def test_a_gpu_and_coded_passes_are_refused(config, module, cache, monkeypatch):
    monkeypatch.setenv(RECIPE_VARIABLE, "recipe.json")
    monkeypatch.setattr(module, "current_platform", SimpleNamespace(device_type="cuda"))
    with refused(CapabilityError, "capability.coded-twice", "KVLAB_RECIPE", "cuda"):
        module.context_of(config, cache(), OWN)


def test_layers_of_another_kind_are_refused(config, context_of, cache):
    found = cache({"sliding_window": 64}, kind="SlidingWindowSpec")
    with refused(CapabilityError, "capability.layer-kinds", "SlidingWindowSpec"):
        context_of(config, found, OWN)


def test_a_folder_that_is_no_model_is_refused(config, context_of, cache, tmp_path):
    config.model_config.model = str(tmp_path)
    with refused(ModelError, "model.no-config", tmp_path, "config.json"):
        context_of(config, cache(), OWN)


@pytest.mark.parametrize(
    ("role", "restore", "save"),
    [("kv_both", True, "answer"), ("kv_producer", False, "answer"), ("kv_consumer", True, "never")],
)
def test_the_role_of_the_engine_is_heard(module, role, restore, save):
    from vllm.config import KVTransferConfig

    from kvlab.kvstore.vllm.connector import settings_of

    given = transfer_config("folder", save="answer") | {"kv_role": role}
    found = settings_of(KVTransferConfig(**given))
    assert (found.restore, found.save) == (restore, save)
