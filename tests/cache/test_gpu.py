"""The transformers cache on a GPU: it answers as on a CPU. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cache.test_served import ENDS, Fitted, recipe
from cache.test_hf_cache import HEAD_DIM, HEADS, LAYERS, generated, logits
from codec.ladder_making import RECIPES, UNSTORED
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.cache.hf.rope import find_rotary, turns
from kvlab.cache.pages.rope import Rotation
from kvlab.core.errors import NonFinite
from kvlab.core.recipe import Recipe
from refusals import refused

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

TEXT = torch.randint(1, 320, (1, 96), generator=torch.Generator().manual_seed(9))
UNCALIBRATED = ("identity", "int", "kivi", "kivi-token", "hadamard", "fp8", "nf4", "d4", "e8", "ggml")


def made(device: str) -> LlamaForCausalLM:
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


@pytest.fixture(scope="module")
def models() -> dict[str, LlamaForCausalLM]:
    return {device: made(device) for device in ("cpu", "cuda")}


@pytest.fixture(scope="module")
def fitted(models) -> Fitted:
    rotary = find_rotary(models["cpu"], HEAD_DIM)
    return Fitted(models["cpu"], Rotation(turns(rotary, 0, torch.arange(128)[None], torch.empty(0))[0].table))


@pytest.mark.parametrize("name", UNCALIBRATED)
def test_a_codec_answers_as_on_a_cpu(models, name):
    stream = RECIPES[name](7 if name in ("e8", "d4") else 8)
    found = {}
    for device, model in models.items():
        cache = KVCache(model, Recipe(k=stream, v=stream))
        parts = [part.to(device) for part in TEXT.split([64, 1, 1, 30], dim=1)]
        found[device] = logits(model, cache, *parts).cpu()
        cache.check()
    torch.testing.assert_close(found["cuda"], found["cpu"], atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("cuts", [[1] * 14, [9, 1, 1, 1, 5, 1, 11, 1], [40, 1, 1]], ids=str)
def test_served_rows_answer_as_on_a_cpu(models, fitted, ends, cuts):
    found, bytes = {}, {}
    for device, model in models.items():
        cache = KVCache(model, recipe(bits=4, **ENDS[ends]), fitted)
        parts = [part.to(device) for part in TEXT[:, : sum(cuts)].split(cuts, dim=1)]
        found[device] = logits(model, cache, *parts).cpu()
        cache.check()
        bytes[device] = cache.nbytes
    # a component between two values goes to the one or the other
    torch.testing.assert_close(found["cuda"], found["cpu"], atol=3e-2, rtol=1e-2)
    assert bytes["cuda"] == bytes["cpu"]


def test_a_batch_with_padding_generates_what_its_rows_do(models, fitted):
    model = models["cuda"]
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[0, :7] = 0
    ids = torch.cat([TEXT[:, :30], TEXT[:, 40:70]]).masked_fill(mask == 0, 0).cuda()
    cache = KVCache(model, recipe(bits=6), fitted)
    together = generated(model, cache, ids, attention_mask=mask.cuda(), max_new_tokens=8, min_new_tokens=8)
    for row, own in enumerate((ids[:1, 7:], ids[1:])):
        alone = generated(model, KVCache(model, recipe(bits=6), fitted), own, max_new_tokens=8, min_new_tokens=8)
        assert torch.equal(together[row, -8:], alone[0, -8:])


def test_a_token_that_cannot_be_coded_is_refused(models, fitted):
    model = made("cuda")
    cache = KVCache(model, recipe(), fitted)
    with torch.inference_mode():
        model(TEXT[:, :9].cuda(), past_key_values=cache)
        model.model.layers[1].self_attn.v_proj.weight.fill_(torch.inf)
        with refused(NonFinite):
            model(TEXT[:, 9:10].cuda(), past_key_values=cache)
