"""Codecs on a GPU answer as on a CPU, in the transformers cache. Skipped where there is none.

What serves `klt` there is in `pages/triton_cases.py`.
"""

from __future__ import annotations

import pytest
import torch

from cache.pages.triton_cases import TEXT, tiny_llama
from cache.test_hf_cache import logits
from codec.ladder_making import RECIPES
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.core.recipe import Recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

UNCALIBRATED = ("identity", "int", "kivi", "kivi-token", "hadamard", "fp8", "nf4", "d4", "e8", "ggml")


@pytest.mark.parametrize("name", UNCALIBRATED)
def test_a_codec_answers_as_on_a_cpu(name):
    stream = RECIPES[name](7 if name in ("e8", "d4") else 8)
    found = {}
    for device in ("cpu", "cuda"):
        model = tiny_llama(device)
        cache = KVCache(model, Recipe(k=stream, v=stream))
        parts = [part.to(device) for part in TEXT.split([64, 1, 1, 30], dim=1)]
        found[device] = logits(model, cache, *parts).cpu()
        cache.check()
    torch.testing.assert_close(found["cuda"], found["cpu"], atol=2e-2, rtol=1e-2)
