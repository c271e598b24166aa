"""An engine's own cache in fewer bits: what is refused, and what is found in the running engine."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from kvlab.core.errors import CapabilityError, UnknownName
from kvlab.engines.capability import check
from kvlab.engines.registry import start
from refusals import refused

TOKENS = list(range(3, 83))
AVX512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="vLLM reads an fp8 cache with AVX-512 only"
)


@pytest.fixture
def info(hf_engine):
    return hf_engine.info


@pytest.mark.parametrize("dtype", ["turboquant_4bit_nc", "int8_per_token_head", "nvfp4", "fp8", "FP8_E4M3"])
def test_cache_dtypes_that_vllm_takes_and_gets_wrong_are_refused(info, dtype):
    with refused(UnknownName, None, "vllm cache dtype", repr(dtype), "allowed: auto, fp8_e4m3, fp8_e5m2"):
        check("vllm", "bfloat16", "default", info, cache_dtype=dtype)


def test_transformers_has_no_cache_of_its_own_to_choose(info):
    with refused(UnknownName, None, "hf cache dtype", "'fp8_e4m3'"):
        start("hf", info, "float32", max_tokens=96, cache_dtype="fp8_e4m3")


def test_vllms_cache_is_no_larger_than_the_engine_is_told(vllm_engine):
    """A variable that other engines of this process read gives each a GiB; vLLM prefers it to what it is told."""
    from kvlab.engines.hooks import attention_layers
    from kvlab.engines.vllm.process import CACHE_SPACE, cache_bytes

    held = sum(layer.attn.kv_cache.nbytes for layer in attention_layers(vllm_engine.model, vllm_engine.info))
    assert 0 < held <= cache_bytes(vllm_engine.info, "float32", 96) < 2**28
    assert os.environ[CACHE_SPACE] == "1"


def test_a_processor_without_the_instructions_is_refused_before_anything_loads(info, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with refused(CapabilityError, "capability.processor", "AVX-512", "AVX2"):
        check("vllm", "bfloat16", "default", info, cache_dtype="fp8_e4m3")
    check("vllm", "bfloat16", "default", info, on_cpu=False, cache_dtype="fp8_e4m3")


def test_head_sizes_of_the_fp8_kernel(info):
    with refused(CapabilityError, None, "head size 80", "multiples of 32"):
        check("vllm", "bfloat16", "default", replace(info, head_dim=80), cache_dtype="fp8_e5m2")


def test_storage_is_what_the_engines_hold(hf_engine, vllm_engine):
    assert (hf_engine.storage.dtype, hf_engine.storage.itemsize) == ("float32", 4)
    assert (vllm_engine.storage.dtype, vllm_engine.storage.itemsize) == ("float32", 4)
    assert "Attention" in vllm_engine.storage.cache


@pytest.fixture(scope="session")
def fp8_engine(vllm_engine):
    """Kept to the end: with the first engine that goes, vLLM gives up what all engines of a process share."""
    return start("vllm", vllm_engine.info, "float32", max_tokens=96, cache_dtype="fp8_e4m3")


@AVX512
def test_an_fp8_cache_beside_the_plain_engine(vllm_engine, fp8_engine):
    before, other = vllm_engine.score(TOKENS, 0), fp8_engine
    assert (other.storage.dtype, other.storage.itemsize) == ("fp8_e4m3", 1)
    assert not torch.equal(other.score(TOKENS, 0), before)
    assert torch.equal(vllm_engine.score(TOKENS, 0), before)


@AVX512
def test_a_cache_that_is_not_what_was_asked_for(vllm_engine, monkeypatch):
    monkeypatch.setattr(vllm_engine._loaded, "_asked", "fp8_e4m3")
    with refused(CapabilityError, "capability.cache-dtype", "fp8_e4m3", "float32", "4 bytes"):
        _ = vllm_engine.storage
