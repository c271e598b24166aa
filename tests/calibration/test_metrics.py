"""The metrics read from a model's files are those of the model as it runs."""

from __future__ import annotations

import pytest
import torch

import tiny
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.codecs.shared.metric import of_outputs
from kvlab.core.model import resolve
from kvlab.core.params import Model


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_rotation_and_output_projection_are_the_models_own(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    folder = tiny.write_model(tmp_path / kind, kind)
    metrics = ErrorMetrics(resolve(Model(path=str(folder), revision=None, n_layers=3)), context=8)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(8)[None])
    assert torch.equal(torch.cat((metrics.angles[2][0], metrics.angles[2][0]), -1), cos[0])
    assert torch.equal(torch.cat((metrics.angles[2][1], metrics.angles[2][1]), -1), sin[0])
    weight = model.model.layers[2].self_attn.o_proj.weight.detach()
    torch.testing.assert_close(metrics.v(2), of_outputs(weight, 2, 32))


def test_an_error_moves_the_scores_of_the_model_as_its_metric_says(hf_engine, tiny_params):
    """Scores of rotated queries and keys, from the model's own rotary embedding, against e^T M e."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    metrics = ErrorMetrics(hf_engine.info, context=8)
    source = torch.Generator().manual_seed(0)
    queries, error = torch.randn(7, 32, generator=source), torch.randn(32, generator=source)
    cos, sin = hf_engine.model.model.rotary_emb(torch.zeros(1), torch.arange(8)[None])
    squares = []
    for lag in range(8):  # the query at position 7, the key `lag` before it
        rows = torch.zeros(1, 1, 8, 32)
        rows[0, 0, 7 - lag] = error
        for_query = torch.zeros(1, 7, 8, 32)
        for_query[0, :, 7] = queries
        q, k = apply_rotary_pos_emb(for_query, rows, cos, sin)
        squares.append((q[0, :, 7] @ k[0, 0, 7 - lag]).square().mean())
    weights = 1 / torch.arange(1.0, 9)
    moved = (weights / weights.sum() * torch.stack(squares)).sum()
    metric = metrics.k(0, (queries.mT @ queries / 7)[None].double())[0]
    torch.testing.assert_close((error.double() @ metric @ error.double()).float(), moved, rtol=1e-4, atol=0)
