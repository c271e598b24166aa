"""Latent caches and evictions as rows for the gate: planned, measured as codecs are, and told where they cannot run."""

from __future__ import annotations

import pytest

from kvlab.core.errors import CodecNotActive, Fault, WitnessDisagrees
from kvlab.core.records import CANARY_MIN
from kvlab.measure import mechanism as keeping
from kvlab_pipeline.gate_page.measured_rows import rows_of
from kvlab_pipeline.jobs.measure import Lab
from kvlab_pipeline.studies.mechanisms import measure as measuring
from kvlab_pipeline.studies.mechanisms import plan, records
from pipeline.studies.mechanism_rows import asking, assert_registered, assert_vouched, measurer
from pipeline.studies.test_mechanisms import engine_of, row, scores, tiny_needles
from refusals import refused

pytestmark = pytest.mark.nightly  # rows of the gate are measured again
__all__ = ["engine_of", "tiny_needles"]  # fixtures
EVICTED, LATENT, WINDOW = "attention:percent=50,sinks=2,recent=8", "latent:rank=64", "sinks:percent=25"


@pytest.fixture(scope="module")
def measured(request, tiny_params, tiny_windows, tiny_needles, tiny_fitted, engine_of, tmp_path_factory):
    """engine -> its record and table."""
    given = (request, tiny_params, tiny_windows, tiny_needles, tiny_fitted, engine_of, tmp_path_factory)
    return measurer("kept", (EVICTED, LATENT, WINDOW), *given)


@pytest.fixture(scope="module")
def on_hf(measured):
    return measured("hf")


def test_each_is_a_variant_that_the_gate_knows(tiny_params):
    found = [v for v in plan.variants(asking(tiny_params, "kept", EVICTED, LATENT, WINDOW), "hf") if v.kept]
    assert [v.variant for v in found] == ["eviction", "latent_lowrank", "eviction"]
    assert len({v.recipe_id for v in found}) == 3 and {v.codec for v in found} == {None}
    for variant in found:
        assert_registered(variant, variant.kept)
        assert variant.protocol(("snapshot",)) == "snapshot" and variant.span(("snapshot",)) == "context"
    without = plan.variants(asking(tiny_params, "kept", LATENT, protocols=("in_forward",)), "hf")
    assert not [v for v in without if v.kept]


def test_it_stores_less_and_reads_all_of_that(on_hf, tiny_params):
    record, table = on_hf
    plain = row(record, "baseline")
    for name, share in ((EVICTED, 0.5), (LATENT, 0.5), (WINDOW, 0.25)):
        found = row(record, name)
        assert found.kv_values == plain.kv_values and found.read_bytes == found.kv_bytes
        assert share <= found.kv_bytes / plain.kv_bytes < share + 0.05  # places of tokens, and the first ones whole
        assert found.canary_kl >= CANARY_MIN and found.codec is None and found.fires == found.expected_fires > 0
        assert max(scores(table, name, "kl")) > 0
        assert found.compression_overhead_ms > 0
        assert {run.quality_eval_id for run in found.evals} == {run.quality_eval_id for run in plain.evals}
    assert row(record, WINDOW).pattern == "sinks:percent=25,sinks=4" and plain.pattern is None
    assert max(scores(table, WINDOW, "kl")) > max(scores(table, EVICTED, "kl"))


def test_a_store_keeps_every_row_apart_also_those_without_a_coder(
    tiny_params, tiny_windows, tiny_needles, tiny_fitted, tmp_path
):
    asked = asking(tiny_params, "kept", EVICTED, LATENT, patterns=("window:window=12",))
    with Lab.open(asked, tiny_windows, {"hf": tiny_fitted}) as lab:
        part = measuring.MechanismsPart(lab, "hf", tiny_needles, "code", tmp_path / "hf.parquet")
        found = [str(subject.identity()) for subject in part.subjects]
    assert {subject.planned.label for subject in part.subjects} >= {"baseline", EVICTED, LATENT, "window:window=12"}
    assert "None" not in found and len(set(found)) == len(found)


def test_texts_are_written_over_what_is_left(on_hf):
    record, table = on_hf
    written = {run.quality_eval_id: run.items for run in row(record, WINDOW).evals}
    assert written["greedy_agreement"] > 0
    assert min(scores(table, WINDOW, "greedy_prefix")) < 1 == max(scores(table, "baseline", "greedy_prefix"))


def test_rows_have_evidence_of_what_ran_and_the_gate_finds_nothing_wrong_with_it(on_hf):
    record, table = on_hf
    made = {one["row_id"].rpartition("/")[2]: one for one in rows_of(record, table, "supported")}
    for name in (EVICTED, LATENT):
        found = made[name]
        cited = next(run for run in row(record, name).evals if run.quality_eval_id == found["quality_eval_id"])
        assert cited.quality_eval_id == ("needle" if name == EVICTED else "kv_fidelity")
        assert found["pattern"] == row(record, name).pattern and found["read_bytes"] == cited.read_bytes
        assert_vouched(found, "attention:percent=90,sinks=2,recent=8")


def test_on_vllm_latents_are_measured_and_evictions_say_why_not(measured):
    record, _ = measured("vllm")
    assert [one.label for one in record.missing] == [EVICTED, WINDOW]
    assert "pages of its own, which keep every token" in record.missing[0].reason
    assert row(record, LATENT).canary_kl >= CANARY_MIN


def test_a_witness_computes_one_window_of_each_again(on_hf, tmp_path):
    record, _ = on_hf
    for name in (EVICTED, LATENT, WINDOW):
        assert 0 <= row(record, name).witnessed_kl < 1e-4
    silent = [one.model_copy(update={"witnessed_kl": None}) for one in record.rows]
    with refused(WitnessDisagrees, "witness.none", EVICTED):
        records.refuse_impossible(record.model_copy(update={"rows": tuple(silent)}), tmp_path)


def test_a_cache_that_was_not_read_is_what_a_witness_finds(measured, monkeypatch):
    right = keeping.over_kept

    def other(run, coder):
        """Logits over a cache whose values are a little larger than those that were kept."""
        logits, held = right(run, coder)
        coder.made = {place: 1.2 * x if place[1] == "v" else x for place, x in coder.made.items()}
        return logits, held

    monkeypatch.setattr(keeping, "over_kept", other)
    with refused(WitnessDisagrees, "witness.other-logits", WINDOW):
        measured("hf", WINDOW)


def test_what_would_leave_out_nothing_is_told(measured, hf_engine):
    info = hf_engine.info
    whole = f"latent:rank={2 * info.n_kv_heads * info.head_dim}"
    record, _ = measured("hf", "sinks:kept=4096", whole, WINDOW)
    assert [one.label for one in record.missing] == ["sinks:kept=4096", whole]
    assert "leaves out nothing of 64 tokens" in record.missing[0].reason
    assert "no more than its latent has" in record.missing[1].reason


@pytest.mark.parametrize("name", [WINDOW, LATENT])
def test_a_way_that_changes_what_keeps_everything_is_refused(measured, monkeypatch, name):
    right = keeping.extremes
    monkeypatch.setattr(keeping, "extremes", lambda *given: right(*given)[::-1])
    with refused(Fault, "fault.floor", name):
        measured("hf", name)
    monkeypatch.setattr(keeping, "extremes", lambda *given: right(*given)[:1] * 2)
    with refused(CodecNotActive, "not-active.canary", name):
        measured("hf", name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("window:window=8", "names 'window:window=8'; allowed: latent, sinks, small_keys, attention"),
        ("latnt:rank=8", "did you mean 'latent'"),
        ("sinks:percent=100", "which is below 100"),
        ("latent:wide=3", "setting of latent"),
    ],
)
def test_what_no_row_can_be_of_is_said_with_the_parameters(tiny_params, name, said):
    (problem,) = asking(tiny_params, "kept", name).mechanisms.problems(tiny_params)
    assert said in problem
