"""Attention by a pattern as rows for the gate: planned, measured on transformers, and told where it cannot run."""

from __future__ import annotations

import pytest

from kvlab.attention.hf import attending, plan_of
from kvlab.attention.patterns import Full, SlidingWindow
from kvlab.core.errors import CodecNotActive, Fault
from kvlab.core.records import CANARY_MIN
from kvlab.gate.catalogue import EVIDENCE
from kvlab.measure import mechanism
from kvlab_pipeline.gate_page.measured_rows import rows_of
from kvlab_pipeline.studies.mechanisms import measure as measuring
from kvlab_pipeline.studies.mechanisms import plan
from pipeline.studies.mechanism_rows import asking, assert_registered, assert_vouched, measurer
from pipeline.studies.test_mechanisms import engine_of, row, scores, tiny_needles
from refusals import refused

__all__ = ["engine_of", "tiny_needles"]  # fixtures
NAME, WINDOW = "block_sparse:block=8,top_k=1,window=8,sinks=0", "window:window=12"


@pytest.fixture(scope="module")
def measured(request, tiny_params, tiny_windows, tiny_needles, tiny_fitted, engine_of, tmp_path_factory):
    """engine -> its record and table."""
    given = (request, tiny_params, tiny_windows, tiny_needles, tiny_fitted, engine_of, tmp_path_factory)
    return measurer("patterns", (NAME, WINDOW), *given)


@pytest.fixture(scope="module")
def on_hf(measured):
    return measured("hf")


def test_each_pattern_is_a_variant_that_the_gate_knows(tiny_params):
    asked = asking(tiny_params, "patterns", NAME, WINDOW, "chunk_summary:chunk=8")
    found = [v for v in plan.variants(asked, "hf") if v.pattern]
    assert [v.variant for v in found] == ["block_sparse", "block_sparse", "chunk_summary"]
    assert len({v.recipe_id for v in found}) == 3
    for variant in found:
        assert_registered(variant, variant.pattern)
        assert variant.protocol(("snapshot",)) == "in_forward"


def test_it_stores_all_and_reads_less(on_hf):
    record, table = on_hf
    plain, sparse, window = (row(record, label) for label in ("baseline", NAME, WINDOW))
    assert window.kv_bytes == plain.kv_bytes and window.kv_values == plain.kv_values
    assert plain.kv_bytes < sparse.kv_bytes < 1.2 * plain.kv_bytes  # means of blocks stand beside
    assert 0 < sparse.read_bytes < plain.kv_bytes and 0 < window.read_bytes < plain.kv_bytes
    assert sparse.pattern == f"{NAME},score=mean" and window.pattern == WINDOW
    assert plain.pattern is None and plain.read_bytes is None
    assert min(sparse.canary_kl, window.canary_kl) >= CANARY_MIN
    assert {run.quality_eval_id for run in sparse.evals} == {"kv_fidelity", "needle"}
    assert max(scores(table, WINDOW, "kl")) > 0


def test_what_a_step_reads_is_counted(on_hf, hf_engine):
    found = row(on_hf[0], WINDOW)
    token = hf_engine.info.values_per_token * hf_engine.storage.itemsize
    assert found.read_bytes == 12 * token * found.evals[0].items


def test_rows_have_evidence_of_what_ran_and_the_gate_finds_nothing_wrong_with_it(on_hf):
    record, table = on_hf
    made = {one["row_id"].rpartition("/")[2]: one for one in rows_of(record, table, "supported")}
    found = made[NAME]
    assert found["pattern"] == f"{NAME},score=mean" and found["mechanism_variant"] == "block_sparse"
    needles = next(run for run in row(record, NAME).evals if run.quality_eval_id == "needle")
    assert (found["quality_eval_id"], found["read_bytes"]) == ("needle", needles.read_bytes)
    assert found["compression_ratio"] > 1
    assert [piece["observed"]["pattern"] for piece in found[EVIDENCE]] == [found["pattern"]] * 2
    assert_vouched(found, "block_sparse:block=8,top_k=0,window=8,sinks=0,score=mean")


def test_on_vllm_it_is_not_run_and_the_reason_is_told(measured):
    record, table = measured("vllm")
    assert [one.label for one in record.missing] == [NAME, WINDOW]
    assert "reads its own pages with its own kernel" in record.missing[0].reason
    told = [one for one in rows_of(record, table, "supported") if one["row_id"].endswith(WINDOW)]
    assert [one["support_status"] for one in told] == ["unsupported"] and "no pattern" in told[0]["mechanism_notes"]


def test_a_pattern_that_would_leave_nothing_out_is_told_and_one_that_does_is_refused(measured, monkeypatch):
    record, _ = measured("hf", "window:window=4096", WINDOW)
    assert [one.label for one in record.missing] == ["window:window=4096"] and row(record, WINDOW).read_bytes
    assert "leaves out nothing of 64 tokens" in record.missing[0].reason
    monkeypatch.setattr(measuring, "refuse_needless", lambda *_: None)
    with refused(CodecNotActive, "not-active.nothing-left-out"):
        measured("hf", "window:window=4096")


def test_a_way_that_changes_what_reads_everything_is_refused(measured, monkeypatch):
    monkeypatch.setattr(mechanism, "Full", lambda: SlidingWindow(1))
    with refused(Fault, "fault.floor", NAME):
        measured("hf", NAME)


def test_a_pattern_that_does_not_reach_the_attention_is_refused(measured, monkeypatch):
    monkeypatch.setattr(mechanism, "SlidingWindow", lambda _: Full())
    with refused(CodecNotActive, "not-active.canary", NAME):
        measured("hf", NAME)


def test_what_a_model_reads_by_is_asked_of_the_model(hf_engine):
    model = hf_engine.model
    assert plan_of(model) is None
    layers = (SlidingWindow(3),) * hf_engine.info.n_layers
    with attending(model, layers):
        assert plan_of(model) == layers
    assert plan_of(model) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("latent:rank=8", "names 'latent:rank=8'; allowed: block_sparse, window, chunk_summary"),
        ("block_spars:block=8", "did you mean 'block_sparse'"),
        ("window:window=0", "allowed: a whole number, 1 or more"),
        ("window:wide=3", "setting of window"),
    ],
)
def test_what_no_row_can_be_of_is_said_with_the_parameters(tiny_params, name, said):
    (problem,) = asking(tiny_params, "patterns", name).mechanisms.problems(tiny_params)
    assert said in problem
