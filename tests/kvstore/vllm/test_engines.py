"""Snapshots between transformers and vLLM: refused by the salt, and read by both where they are to be shared."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.ledger import ChunkEntry, Ledger
from kvlab.kvstore.restore import restore
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.identity import identity_of
from kvlab.kvstore.snapshot.write import SnapshotSource, save
from kvstore.vllm.conftest import CHUNK, whole

pytestmark = [pytest.mark.nightly, pytest.mark.engine]
STEPS = 12


@pytest.fixture(scope="module")
def model(reference):
    return AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def identity(info):
    return identity_of(info, "float32", CHUNK)


@torch.inference_mode()
def greedy(model, tokens: list[int], cache: DynamicCache, begin: int = 0) -> list[int]:
    """Tokens that transformers gives after a prompt of which the cache holds the first `begin`."""
    given, answer = tokens[begin:], []
    for _ in range(STEPS):
        answer.append(model(torch.tensor([given]), past_key_values=cache).logits[0, -1].argmax().item())
        given = answer[-1:]
    return answer


def chunks_of(cache: DynamicCache, length: int) -> list[torch.Tensor]:
    rows = torch.stack([torch.cat([layer.keys, layer.values]) for layer in cache.layers])[:, :, :, :length]
    return [chunk.contiguous() for chunk in rows.split(CHUNK, dim=3)]


def test_vllm_goes_on_from_what_transformers_saved(engine, model, identity, prompts):
    engine.empty()
    for prompt in prompts[:6]:
        cold, cache, length = engine.cold(prompt, n=STEPS), DynamicCache(), whole(prompt)
        assert greedy(model, prompt, cache) == cold["tokens"][0]
        count = length // CHUNK
        source = SnapshotSource(
            identity, chunks_of(cache, length), Ledger((ChunkEntry(True, None, 0),) * count, 0), prompt
        )
        save(engine.folder / "from transformers", source, upto=length, made={"engine": "transformers"})
        warm = engine.generate(prompt, n=STEPS)
        assert warm["said"][0]["snapshot"] == "from transformers" and warm["said"][0]["reasons"] == []
        assert warm["counts"]["tokens_loaded"] == length
        assert warm["tokens"] == cold["tokens"]
    longer = engine.generate([*prompts[5], *prompts[6][:40]])["said"][0]
    assert longer["snapshot"] == "from transformers"
    with read.open(engine.folder / longer["saved"]) as snapshot:
        assert snapshot.manifest.made["engine"] == "transformers, then vllm"


def test_transformers_goes_on_from_what_vllm_saved(engine, model, identity, prompts):
    engine.empty()
    for prompt in prompts[6:12]:
        name = engine.generate(prompt)["said"][0]["saved"]
        cold = DynamicCache()
        answer = greedy(model, prompt, cold)
        with read.open(engine.folder / name) as snapshot:
            length = whole(prompt)
            assert snapshot.check(identity, prompt) == [] and snapshot.usable_prefix(prompt) >= length
            chunks = snapshot.load(length)
        mine = torch.cat(chunks_of(cold, length), dim=3)
        theirs = torch.cat(chunks, dim=3)
        assert (mine - theirs).abs().max() < 1e-5 * mine.abs().max()
        warm = DynamicCache()
        for number, (k, v) in enumerate(theirs.unbind()):
            warm.update(k[None], v[None], number)
        assert greedy(model, prompt, warm, length) == answer


def test_a_paged_run_and_vllm_restore_one_another(engine, info, prompts):
    engine.empty()
    model, config = PagedModel.load(info), PagerConfig(pool_tokens=512, chunk_tokens=CHUNK)
    prompt, other = prompts[12], prompts[13]
    answer = engine.generate(prompt)
    found = restore(model, prompt, engine.folder, config)
    assert found.report.consumed and found.report.prefix_len == whole(prompt)
    assert found.logits.argmax().item() == answer["tokens"][0][0]
    run = PagedRun(model, config)
    run.extend(other)
    run.save(engine.folder / "from a pager")
    warm = engine.generate(other)
    assert warm["said"][0]["snapshot"] == "from a pager" and warm["counts"]["tokens_loaded"] == whole(other)
    assert warm["tokens"] == engine.cold(other)["tokens"]
