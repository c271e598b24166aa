"""A recipe in vLLM on a CPU: a cache that was given no size gets one that is there, and one line says so."""

import logging
from types import SimpleNamespace

import pytest

from kvlab.cache.vllm import settings as vllm_settings

GIB = 1 << 30


def config(device="cpu", chosen=None):
    cache = SimpleNamespace(kv_cache_memory_bytes=chosen)
    return SimpleNamespace(device_config=SimpleNamespace(device_type=device), cache_config=cache)


@pytest.mark.parametrize(
    ("free", "device", "chosen", "expected"),
    [
        (95, "cpu", None, 23),  # vLLM's own processes take some before it looks
        (40, "cpu", None, 10),
        (2, "cpu", None, 1),
        (40, "cpu", 3 * GIB, 3),
        (40, "cuda", None, None),
    ],
)
def test_the_cache_is_given_what_is_there(monkeypatch, caplog, free, device, chosen, expected):
    monkeypatch.setattr(vllm_settings, "_memory", lambda: (100 * GIB, free * GIB))
    monkeypatch.setattr(vllm_settings, "logger", lambda: logging.getLogger("kvlab.test"))
    served = config(device, chosen)
    vllm_settings.fit_cache(served)
    found = served.cache_config.kv_cache_memory_bytes
    assert found == (expected and expected * GIB)
    changed = found != chosen
    assert [record.getMessage().count("\n") for record in caplog.records] == ([0] if changed else [])
    assert not changed or "VLLM_CPU_KVCACHE_SPACE=N" in caplog.text
