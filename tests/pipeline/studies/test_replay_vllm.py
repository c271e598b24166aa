"""Rows that vLLM measured, its own cache, fp8 and coded pages, measured again by the same code: equal to the bit."""

from __future__ import annotations

import pytest
import torch

from kvlab.engines import registry
from kvlab_pipeline.studies.mechanisms.plan import FIDELITY, NEEDLE
from pipeline.replayed import lenient, workspace
from pipeline.studies.test_mechanisms import engine_of

__all__ = ["engine_of"]  # a fixture

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() != "AVX512", reason="vLLM reads an fp8 cache with AVX-512 only"
    ),
]
WINDOWS = 72  # enough to certify a row among those that are tried here
LABELS = ("baseline", "fp8_e4m3", "klt 2 pages", "hadamard 2 pages", "hadamard 2 in_forward")


@pytest.fixture(scope="module")
def origin(tiny_params, tmp_path_factory, engine_of, vllm_engine):
    """The workspace, made once."""
    root = tmp_path_factory.mktemp("workspace")
    asked = {"protocols": ("in_forward",), "codecs": (), "caches": (), "in_forward": ("hadamard",), "greedy": 0}
    asked |= {"pages": ("klt", "hadamard"), "pages_sink": 2, "pages_recent": 8, "cache_dtypes": ("fp8_e4m3",)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "start", engine_of)
        evals = lenient(root / "evals.yaml")
        yield workspace(root, tiny_params, ("vllm",), WINDOWS, evals, bits=(2,), **asked)


def test_rows_of_vllm_are_certified_by_measuring_again(origin):
    rows = origin.written()
    before, after = origin.claims(rows, replayer=None), origin.claims(rows, items=2)
    best = {name for name, claim in before.items() if claim.earned == "supported"}
    assert best == {origin.of(label) for label in LABELS}, {n: (c.earned, c.codes) for n, c in before.items()}
    wrong = {name: (claim.replay.lacking, claim.replay.differs) for name, claim in after.items() if claim.replay}
    assert {name for name, claim in after.items() if claim.certified} == best, wrong
    for name in best:
        scores = after[name].replay.scores
        assert {score.quality_eval_id for score in scores} >= {FIDELITY, NEEDLE}
        assert all(score.claimed == score.found for score in scores)
