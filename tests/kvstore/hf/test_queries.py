"""The last queries and the attention mass, held against what the model itself says of its attention."""

from __future__ import annotations

import pytest
import torch

import tiny
from kvlab.core.errors import CapabilityError, LayoutMismatch
from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.queries import LastQueries, attention_mass
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvstore.hf.prompts import prompt, run_after
from refusals import refused


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_mass_is_that_of_the_models_own_attention(kind, tmp_path):
    """Projection, norm, rotation, grouping and scaling of the queries are all right, or this is wrong."""
    info = resolve(Model(path=str(tiny.write_model(tmp_path, kind)), n_layers=3))
    model, tokens = PagedModel.load(info, attention="eager"), prompt(45)
    run = run_after(tokens, model, PagerConfig(pool_tokens=64, chunk_tokens=8), "oracle")
    with torch.no_grad():
        attended = model.model(torch.tensor([tokens]), output_attentions=True).attentions
    theirs = torch.stack(attended)[:, 0, :, -1].mean((0, 1)).split(8)
    ours = attention_mass(run._queries.at(44), run.keys(), 8, model.scaling)
    assert torch.allclose(ours.float(), torch.stack([part.sum() for part in theirs]), atol=1e-5)
    assert ours.std() > 0.01  # there is something to be told apart


def test_mass_counts_evicted_chunks(model, small):
    run = run_after(prompt(96), model, small, "oracle", every=8)
    assert len(run.pager.resident) < run.pager.sealed == 12
    mass = torch.tensor([entry.score for entry in run.pager.ledger().entries])
    gone = [chunk for chunk in range(12) if chunk not in run.pager.resident]
    assert mass.sum() == pytest.approx(1) and (mass[gone] > 0).all()


def test_mass_of_a_planted_key():
    keys = torch.zeros(2, 2, 7, 4)
    keys[:, 1, 5] = torch.tensor([9.0, 0, 0, 0])
    queries = torch.zeros(2, 4, 4)
    queries[:, 2:, 0] = 9.0  # the query heads of KV head 1
    found = attention_mass(queries, keys, 3, 1.0)
    assert found.tolist() == pytest.approx([0.5 * 3 / 7, 0.5 * 3 / 7 + 0.5, 0.5 / 7])
    with pytest.raises(LayoutMismatch):
        attention_mass(queries[:, :3], keys, 3, 1.0)


def test_no_query_was_seen(model):
    with refused(CapabilityError, "capability.no-query", "layer 0"):
        LastQueries(model).at(0)


def test_hooks_are_gone_when_a_forward_is_over(model, small):
    run_after(prompt(20), model, small, "qk")
    assert not any(module._forward_hooks for module in model.model.modules())


@pytest.mark.parametrize("every, at", [(8, 40), (16, 32), (64, 0)])
def test_scores_are_made_when_a_multiple_is_reached_or_passed(model, small, every, at):
    run = run_after(prompt(45), model, small, "qk", every=every)
    assert run._scored_at == at
    run.decode(100)
    assert run._scored_at == 145 // every * every


def test_a_policy_without_eyes_is_never_asked(model, small):
    run = run_after(prompt(80), model, small, "lru", every=8)
    assert all(entry.score is None for entry in run.pager.ledger().entries)


def test_the_last_query_of_a_longer_forward_is_that_of_a_forward_of_its_own(model, roomy):
    tokens = prompt(24)
    run = run_after(tokens, model, roomy, "qk")
    one = PagedRun(model, roomy, "qk")
    for token in tokens:
        one.extend([token])
    assert torch.allclose(run._queries.at(23), one._queries.at(23), atol=1e-4)
