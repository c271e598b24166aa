"""Rows that vLLM measured, its own cache, fp8 and coded pages, measured again by the same code: equal to the bit."""

from __future__ import annotations

import shutil

import pytest
import torch

from kvlab.engines import registry
from kvlab_pipeline.studies.mechanisms.plan import FIDELITY, NEEDLE
from kvlab_pipeline.studies.mechanisms.records import EvalRun, read_mechanisms, write_mechanisms
from pipeline.replayed import lenient, workspace
from pipeline.studies.test_mechanisms import engine_of

__all__ = ["engine_of"]  # a fixture

pytestmark = [
    pytest.mark.nightly,
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


def test_a_record_whose_pages_keep_half_as_many_tokens_exact_is_found(origin, tmp_path):
    """Bytes, memory and blocks agree with it, and so do row and evidence: only the engine knows."""
    made = origin._replace(root=tmp_path / "own")
    shutil.copytree(origin.root, made.root)
    record, scores = read_mechanisms(made.record)
    row = next(one for one in record.rows if one.label == "klt 2 pages")
    less = row.pool.exact_bytes // 2
    blocks = (row.pool.cache_memory_bytes - less) // row.pool.block_bytes
    runs = tuple(
        EvalRun.of(
            [one.model_copy(update={"kv_bytes": one.kv_bytes - one.items * less}) for one in run.lengths],
            **run.model_dump(include={"quality_eval_id", "version", "context"}),
        )
        for run in row.evals
    )
    pool = row.pool.model_copy(update={"exact_bytes": less, "cache_blocks": blocks})
    forged = row.model_copy(update={"evals": runs, "kv_bytes": runs[0].kv_bytes, "pool": pool})
    rows = tuple(forged if one is row else one for one in record.rows)
    write_mechanisms(made.record, record.model_copy(update={"rows": rows}), scores)
    few = [one for one in made.written() if one.values["row_id"].endswith((made.of(row.label), "baseline"))]
    assert made.claims(few, replayer=None)[made.of(row.label)].earned == "supported"
    claim = made.claims(few)[made.of(row.label)]
    assert not claim.certified and claim.codes == {"replay_other"}
    assert {reason.field for reason in claim.replay.differs} >= {"pool", f"kv_bytes of {FIDELITY}"}
