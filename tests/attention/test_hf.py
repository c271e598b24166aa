"""Plans as transformers' attention: what leaves nothing out changes nothing, and what ran is counted."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvlab.attention.hf import attending, registered
from kvlab.attention.patterns import BlockSparse, ChunkSummary, Full, SlidingWindow
from kvlab.core.errors import CapabilityError, CodecNotActive
from refusals import refused

SPARSE = BlockSparse(block=8, top_k=1, window=8, sinks=1)
BOUNDED = BlockSparse(block=8, top_k=2, window=3, sinks=0, score="bounds")
PLAN = (Full(), SPARSE, ChunkSummary(chunk=8, top_k=1, exact=1, sinks=1))
IDS = torch.arange(3, 83)[None]


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@torch.inference_mode()
def logits(model, ids=IDS):
    return model(ids).logits


def test_a_plan_that_reads_everything_is_the_model(model):
    due = logits(model)
    every = BlockSparse(block=8, top_k=99, window=1, sinks=0)
    for plan in ((Full(),) * 3, (every,) * 3, (SlidingWindow(80),) * 3):
        with attending(model, plan) as effect:
            assert torch.allclose(logits(model), due, atol=1e-4)
        with refused(CodecNotActive, "not-active.nothing-left-out", plan[-1].name):
            effect.refuse_idle(plan)
    assert torch.equal(logits(model), due)  # and the model is as it was


def test_each_layer_runs_its_own_pattern(model):
    due = logits(model)
    with attending(model, PLAN) as effect:
        assert not torch.allclose(logits(model), due, atol=1e-3)
    effect.refuse_idle(PLAN)
    for layer, pattern in enumerate(PLAN):
        ((read),) = effect.vectors[layer]
        most = [2 * (2 * pattern.keys(t) + pattern.scored(t)) for t in range(80)]  # of two KV heads
        assert all(x <= y for x, y in zip(read.tolist(), most, strict=True))
    assert effect.vectors[0][0].tolist() == [4 * (t + 1) for t in range(80)]


def test_of_the_context_only_its_own_keys_and_values_are_counted(model):
    window, context = 24, 50
    plan = (Full(), SlidingWindow(window), SPARSE)
    with attending(model, plan) as effect:
        effect.context = context
        logits(model)
    full, near, chosen = (effect.early[layer][0].tolist() for layer in range(3))
    for t in range(80):  # vectors of K and of V, of two KV heads
        assert full[t] == 4 * min(t + 1, context)
        assert near[t] == 4 * max(0, min(t + 1, context) - max(0, t - window + 1))
        assert chosen[t] <= 4 * min(SPARSE.keys(t), context)
    mean = [sum(one[-30:]) / 30 for one in (full, near, chosen)]
    assert effect.read_early(30) == pytest.approx(sum(mean))


@torch.inference_mode()
def test_prefill_and_decoding_are_one_forward(model):
    with attending(model, PLAN) as effect:
        whole, cache, parts = logits(model), DynamicCache(), []
        for ids in (IDS[:, :50], IDS[:, 50:70], *IDS[:, 70:].split(1, dim=1)):
            parts.append(model(ids, past_key_values=cache, use_cache=True).logits)
        assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-4)
    assert len(effect.vectors[0]) == 1 + 12
    with refused(CodecNotActive, "not-active.passes", "due: 1 "):
        effect.refuse_idle(PLAN)


@pytest.mark.parametrize("plan", [PLAN, (SlidingWindow(9),) * 3, (BOUNDED,) * 3], ids=["mixed", "window", "bounds"])
def test_what_comes_later_moves_no_bit(model, plan):
    """Through every layer: what a layer above reads was itself made by a pattern."""
    with attending(model, plan):
        due = logits(model)
        for t in (0, 7, 8, 40, 78):
            changed = IDS.clone()
            changed[:, t + 1 :] += 100
            found = logits(model, changed)
            assert torch.equal(found[:, : t + 1], due[:, : t + 1])
            assert not torch.equal(found[:, t + 1 :], due[:, t + 1 :])


def test_transformers_knows_a_plan_by_its_name(model):
    name, _ = registered(PLAN)
    model.set_attn_implementation(name)
    written = model.generate(IDS[:, :20], max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.set_attn_implementation("sdpa")
    assert written.shape == (1, 24)


def test_what_a_plan_cannot_do_is_refused(model):
    with refused(CapabilityError, "capability.layers", "2 layers", "model of 3"), attending(model, PLAN[:2]):
        pass
    padded = torch.ones(1, 80, dtype=torch.long)
    padded[:, :9] = 0
    with attending(model, PLAN), refused(CapabilityError, "capability.padding"):
        model(IDS, attention_mask=padded)
