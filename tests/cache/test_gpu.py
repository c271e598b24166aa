"""Codecs on a GPU answer as on a CPU, in the transformers cache. Skipped where there is none.

What serves `klt` there is in `pages/triton_cases.py`.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cache.test_hf_cache import HEAD_DIM, HEADS, LAYERS, logits
from cache.test_served import TEXT
from codec.ladder_making import RECIPES
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.core.recipe import Recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

UNCALIBRATED = ("identity", "int", "kivi", "kivi-token", "hadamard", "fp8", "nf4", "d4", "e8", "ggml")


def tiny_llama(device: str | torch.device) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().to(device)


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
