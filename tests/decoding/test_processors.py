"""The sampler in transformers: generate writes what the sampler draws, alone and in a padded batch."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvlab_mechanisms.decoding.law import Sampling
from kvlab_mechanisms.decoding.processors import LawProcessor, SamplerProcessor
from kvlab_mechanisms.decoding.speculate import plain

PROMPTS = [list(range(20, 30)), list(range(50, 57)), [7, 9]]
SETTINGS = [Sampling(0.8, 20, 0.9, 0.02, seed=1), Sampling(seed=2), Sampling(0)]
HOW = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_padded_batch_writes_what_each_prompt_writes_alone(model, do_sample):
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    how = HOW | {"do_sample": do_sample} | ({"top_k": 0} if do_sample else {})
    written = model.generate(ids, attention_mask=mask, logits_processor=[SamplerProcessor(SETTINGS)], **how)
    for row, prompt, own in zip(written, PROMPTS, SETTINGS, strict=True):
        alone = model.generate(torch.tensor([prompt]), logits_processor=[SamplerProcessor([own])], **how)
        assert row[width:].tolist() == alone[0, len(prompt) :].tolist() == plain(model, prompt, 20, own)


def test_the_filters_alone_leave_transformers_to_draw(model):
    own = Sampling(0.8, 20, 0.9, 0.02, 1.1)
    torch.manual_seed(3)
    ours = model.generate(
        torch.tensor(PROMPTS[:1]), do_sample=True, top_k=0, logits_processor=[LawProcessor([own])], **HOW
    )
    torch.manual_seed(3)
    theirs = model.generate(
        torch.tensor(PROMPTS[:1]), do_sample=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02,
        repetition_penalty=1.1, **HOW,
    )  # fmt: skip
    assert torch.equal(ours, theirs)
