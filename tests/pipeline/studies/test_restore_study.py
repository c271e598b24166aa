"""The study of restoring on the tiny model, and what its tables make of planted records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvlab.core.errors import Fault, ParamsError
from kvlab_pipeline.studies.record import read_record
from kvlab_pipeline.studies.restore import measure as measuring
from kvlab_pipeline.studies.restore.measure import RAW, common, joined, pool_of, shared_tokens, timed, turns
from kvlab_pipeline.studies.restore.record import RestoreRecord, RestoreSettings, Speed, Unstored, break_even
from kvlab_pipeline.studies.restore.tables import parts, promises
from pipeline.studies.printed import rows, whole
from refusals import refused

pytestmark = pytest.mark.nightly  # a page that FINDINGS.md does not need, measured in two processes

SMALL = RestoreSettings(
    prompts=2,
    prompt_tokens=96,
    decode=4,
    chunk_tokens=16,
    suffix=16,
    lengths=(48, 96, 160),
    shorter=(32,),
    rounds=2,
    policies=("lru", "qk"),
    pool=0.6,
    evicted_prompts=1,
    codecs=("klt", "int", "fp8"),
    bits=(2,),
    windows=2,
    codec_chunk_tokens=16,
)


@pytest.fixture(scope="module")
def written(tiny_params, tiny_windows, tiny_fitted, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("study") / "restore.json"
    measuring.measure(tiny_params, SMALL, tiny_windows, tiny_fitted, out)
    return out


@pytest.fixture(scope="module")
def record(written) -> RestoreRecord:
    return read_record(written, RestoreRecord, "restore")


def test_what_is_identical_is_found_identical_in_both_processes_and_both_dtypes(record):
    assert [(one.dtype, one.process) for one in record.agreements] == [
        ("float32", "this"),
        ("float32", "new"),
        ("bfloat16", "this"),
        ("bfloat16", "new"),
    ]
    assert {(one.tokens_equal, one.logits_equal, one.prefix_len) for one in record.agreements} == {(2, 2, 80)}


def test_a_small_pool_evicts_and_gives_the_same(record):
    assert [one.policy for one in record.evicted] == ["lru", "qk"]
    for one in record.evicted:
        assert one.pool_tokens < SMALL.prompt_tokens and one.page_outs > 0 and one.restored == one.prompts == 1
        assert (one.tokens_equal, one.residency_equal, one.max_abs_dlogit) == (1, 1, 0.0)


def test_every_length_has_all_its_times_and_the_share_that_was_due(record):
    assert [speed.length for speed in record.speeds] == [32, 48, 96, 160]
    assert [speed.prefix_len for speed in record.speeds] == [16, 32, 80, 144]
    for speed in record.speeds:
        every = (*speed.cold_ms, *speed.warm_ms, *speed.load_ms, *speed.whole_ms)
        assert len(every) == 4 * SMALL.rounds and min(every) > 0 and speed.save_ms > 0
        assert speed.bytes_read == speed.file_bytes  # a restored snapshot is read to its end
    assert record.speeds[-1].ideal == 10


def test_coded_payloads_are_smaller_and_only_they_change_what_comes_next(record):
    by_label = {way.label: way for way in record.stored}
    assert set(by_label) == {RAW, "klt 2", "int 2", "fp8"} and not record.unstored
    raw = by_label.pop(RAW)
    assert (raw.bits_per_value, raw.kl.value, raw.top1_agreement.value, raw.greedy) == (32, 0, 1, SMALL.decode)
    assert raw.lossless and raw.recipe is None and raw.tokens == 2 * 64
    for way in by_label.values():
        assert way.bits_per_value < 16 and way.kl.value > 1e-6 and not way.lossless
        assert len(way.save_ms) == len(way.load_ms) == SMALL.windows
    assert by_label["int 2"].kl.value > by_label["fp8"].kl.value


def test_the_harness_passes_on_the_middle_length(record):
    assert (record.harness.outcome, record.harness.reasons) == ("pass", ())
    assert record.harness.length == 96 and record.harness.prefix_len == 80 and record.harness.speedup > 0


def test_without_a_calibration_codecs_that_need_one_are_left_out_by_name(
    tiny_params,
):
    from kvlab.core.model import resolve
    from kvlab.kvstore.hf.model import PagedModel
    from kvlab_pipeline.studies.restore.measure import ways

    model = PagedModel.load(resolve(tiny_params.model))
    found, missing = ways(tiny_params, model, None, SMALL, 96)
    assert [way.label for way in found] == [RAW, "int 2", "fp8"]
    assert [one.label for one in missing] == ["klt 2"] and "components of a calibration" in missing[0].reason


def test_a_codec_of_whole_caches_is_stored_where_its_calibration_is(
    tiny_params, tiny_windows, tiny_fitted, hf_engine, tmp_path
):
    from dataclasses import replace

    from kvlab.calibration import load as calibration
    from kvlab.kvstore.hf.model import PagedModel
    from kvlab.text import corpus
    from kvlab_pipeline.studies.restore.measure import stored
    from kvstore import archiving

    model, windows = PagedModel.load(hf_engine.info), corpus.load(tiny_windows, hf_engine.info.model_hash)
    calibrated = calibration.load(tiny_fitted, hf_engine.info.model_hash, windows.corpus_hash)
    asked = SMALL.model_copy(update={"codecs": ("int", "archive"), "bits": (4,)})
    found, missing = stored(tiny_params, model, windows, calibrated, asked, tmp_path)
    assert [way.label for way in found] == [RAW, "int 4"]
    assert [(one.label, one.reason) for one in missing] == [("archive 4", "it needs archive of a calibration")]
    whole = replace(calibrated, archive=archiving.fitted(hf_engine, tiny_windows))
    found, missing = stored(tiny_params, model, windows, whole, asked, tmp_path)
    assert [way.label for way in found] == [RAW, "int 4", "archive 4"] and not missing
    archive = found[-1]
    assert archive.bits_per_value == pytest.approx(4, rel=0.01) and archive.kl.value > 0 and not archive.lossless
    assert archive.recipe.k.codec == "archive"


def test_prompts_that_are_too_long_are_refused_before_anything_runs(tiny_params, tiny_windows, tmp_path):
    with refused(ParamsError, "params.too-few-positions", 256):
        measuring.measure(
            tiny_params, SMALL.model_copy(update={"lengths": (254,)}), tiny_windows, None, tmp_path / "out.json"
        )
    assert not (tmp_path / "out.json").exists()


# -------------------------------------------------------------------------------------- parts


def test_prompts_are_joined_from_window_to_window_and_begin_again():
    windows = [[1, 2, 3], [4, 5, 6]]
    assert joined(windows, 0, 5) == [1, 2, 3, 4, 5]
    assert joined(windows, 1, 6) == [4, 5, 6, 1, 2, 3]
    with refused(ParamsError, "params.too-few-tokens", 7, 6):
        joined(windows, 0, 7)


def test_what_is_shared_is_whole_chunks_and_leaves_something():
    assert shared_tokens(2048, 96, 32) == 1952 and shared_tokens(1000, 96, 32) == 896
    assert shared_tokens(128, 96, 32) == 64 and shared_tokens(40, 96, 32) == 32
    with refused(ParamsError, "params.no-shared-chunk", 32):
        shared_tokens(32, 96, 32)
    assert pool_of(16, 1).pool_tokens == 64 and pool_of(16, 100).pool_tokens == 112


def test_ways_take_turns_and_the_first_round_does_not_count():
    order = []

    def way(name):
        def go():
            order.append(name)
            return float(len(order))

        return go

    took = turns([way("a"), way("b")], rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"] and took == [(4.0, 5.0), (3.0, 6.0)]


def test_a_time_that_was_not_taken_is_no_number():
    with refused(Fault, "fault.untimed"):
        timed(None)


def test_tokens_in_front_of_the_first_other_one():
    assert common((1, 2, 3), (1, 2, 3)) == 3 and common((1, 2, 3), (1, 5, 3)) == 1


# ------------------------------------------------------------------------------------- tables


def speed(length: int, cold: float, warm: float, load: float, whole: float = 1.0) -> Speed:
    times = {"cold_ms": (cold,) * 3, "warm_ms": (warm,) * 3, "load_ms": (load,) * 3, "whole_ms": (whole,) * 3}
    prefix = length // 10 * 9
    return Speed(length=length, prefix_len=prefix, save_ms=1.0, bytes_read=10, file_bytes=20, **times)


def test_break_even_is_where_it_pays_from_there_on():
    pays, not_yet = {"cold": 10.0, "warm": 1.0, "load": 2.0}, {"cold": 10.0, "warm": 1.0, "load": 20.0}
    assert break_even([speed(100, **not_yet), speed(200, **pays), speed(300, **pays)], "cold") == 200
    assert break_even([speed(100, **pays), speed(200, **not_yet), speed(300, **pays)], "cold") == 300
    assert break_even([speed(100, **pays), speed(200, **not_yet)], "cold") is None
    assert break_even([], "cold") is None
    assert break_even([speed(100, **pays), speed(200, **pays, whole=50.0)], "whole") == 200


def test_the_ratio_is_of_medians_and_leaves_loading_out():
    one = speed(100, 1, 1, 100).model_copy(update={"cold_ms": (30.0, 40.0, 900.0), "warm_ms": (4.0, 5.0, 6.0)})
    assert (one.ratio, one.ideal, one.by_round, one.restore_ms) == (8.0, 10.0, (7.5, 8.0, 150.0), 105.0)


def test_the_tables_hold_every_row_and_a_dash_for_what_was_not_seen(record):
    found = parts(record)
    assert len(rows(found["agreements"])) == 4 and len(rows(found["prefill"])) == 3
    assert len(rows(found["loading"])) == 4 and found["unstored"] is None
    assert rows(found["stored"])[0][:3] == (RAW, "1536", "32.0")
    assert "Not measured" not in whole("restore", record, found)
    lacking = record.model_copy(update={"unstored": (Unstored(label="klt 2", reason="no components"),)})
    assert "| klt 2 | no components |" in whole("restore", lacking, parts(lacking)).split("## Not measured")[1]
    never = record.model_copy(update={"speeds": (speed(200, 1.0, 1.0, 5.0, whole=1.0),)})
    assert [row[1] for row in rows(parts(never)["break_even"])] == ["–", "–"]


def unmet(record):
    return [line for promise in promises(record) for line in promise.lines]


def test_promises_that_are_not_kept_are_said(record):
    fast = {"speeds": (speed(2000, 10.0, 1.0, 1.0),), "settings": SMALL.model_copy(update={"lengths": (2000,)})}
    kept = record.model_copy(update=fast)
    assert unmet(kept) == []
    assert parts(kept)["kept"] == "All 5 promises are kept." and len(rows(parts(kept)["promises"])) == 5
    one = kept.agreements[1].model_copy(update={"logits_equal": 1})
    pooled = kept.evicted[0].model_copy(update={"residency_equal": 0})
    slow = speed(2000, 10.0, 1.5, 1.0)
    changes = {"agreements": (one,), "evicted": (pooled,), "speeds": (slow,), "settings": SMALL}
    changes["settings"] = SMALL.model_copy(update={"lengths": (2000,)})
    changes["harness"] = kept.harness.model_copy(update={"outcome": "fail", "reasons": ("tokens_differ: x",)})
    said = unmet(kept.model_copy(update=changes))
    assert len(said) == 5
    assert "logits of float32 in new process are equal for 1 of 2" in said[0] and "nothing was measured" in said[1]
    assert "policy lru" in said[2] and "6.67 times faster, due is 7.00" in said[3] and "tokens_differ" in said[4]
    found = parts(kept.model_copy(update=changes))
    assert found["kept"] == "**Of 5 promises 4 not kept and 1 not measured.**"
    assert said[3] in rows(found["promises"])[3][2]


def test_a_promise_about_nothing_is_not_kept(record):
    assert [line for line in unmet(record) if "no reported length" in line]  # the longest prompt here has 160 tokens
    assert [row[1] for row in rows(parts(record)["promises"])] == ["kept", "kept", "kept", "not measured", "kept"]
    bare = record.model_copy(update={"agreements": (), "evicted": (), "speeds": ()})
    assert [row[1] for row in rows(parts(bare)["promises"])] == ["not measured"] * 4 + ["kept"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_abs_dlogit": 1e-6}, "logits up to"),
        ({"page_outs": 0}, "no chunk had to go"),
        ({"restored": 0}, "cold and"),
    ],
)
def test_a_small_pool_promises_bits_and_that_it_was_small(record, change, words):
    one = record.evicted[0].model_copy(update=change)
    assert any(words in line for line in unmet(record.model_copy(update={"evicted": (one,)})))


def test_threads_are_those_of_the_parameters(record):
    assert record.threads == torch.get_num_threads() == 1


def test_the_parameters_of_the_default_run_are_what_is_asked_for(tiny_params):
    asked, found = tiny_params.kvstore.restore, RestoreSettings.of(tiny_params)
    assert (found.lengths, found.suffix, found.rounds) == (asked.lengths, asked.suffix, asked.repeats)
    assert found.prompt_tokens == tiny_params.windows.context and found.windows == tiny_params.windows.test
    assert all(2 * found.chunk_tokens <= length < min(found.lengths) for length in found.shorter)
