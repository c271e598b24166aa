import math

import pytest

from validation.gate.published_rules import (
    EVALS,
    RECORD,
    RULES,
    VARIANTS,
    published_fields,
    published_record,
    published_verdict,
    requires_completed_quality_eval,
)

REGISTERED, STATUS, COMPLETED, DRAFT = RULES


def judged(**row):
    return published_verdict(row | {RECORD: published_record(row)})


FP8 = {"mechanism": "kv_quantization", "mechanism_variant": "fp8_e4m3"}
ODD = {"mechanism": "kv_quantization", "mechanism_variant": "invented"}
MTP = {"mechanism": "speculative_decoding", "mechanism_variant": "mtp"}
SUPPORTED = {"support_status": "supported"}
PREVIEW = {"support_status": "reviewed_preview"}
DONE = {"quality_eval_id": "ruler_v1", "quality_eval_status": "completed"}


@pytest.mark.parametrize(
    ("row", "passes", "failed"),
    [
        (SUPPORTED, None, ()),  # no mechanism: never looked at
        ({"mechanism": "baseline"} | SUPPORTED, True, ()),
        ({"mechanism": "baseline", "mechanism_variant": "odd"} | SUPPORTED, True, ()),
        (FP8 | PREVIEW, True, ()),
        (FP8 | PREVIEW | {"quality_eval_status": "pending"}, True, ()),
        (FP8 | PREVIEW | DONE | {"quality_eval_status": "failed"}, True, ()),
        (FP8 | SUPPORTED, False, (COMPLETED,)),
        *((FP8 | SUPPORTED | DONE | {"quality_eval_status": s}, False, (COMPLETED,)) for s in ("pending", "failed")),
        (FP8 | SUPPORTED | DONE | {"quality_eval_status": "not_required"}, False, (COMPLETED,)),
        (FP8 | SUPPORTED | DONE, True, ()),  # within the tolerance or not: nobody asks
        (FP8 | SUPPORTED | DONE | {"quality_eval_id": None}, False, (COMPLETED,)),
        (FP8 | SUPPORTED | DONE | {"quality_eval_id": "invented"}, False, (COMPLETED,)),
        (ODD | PREVIEW, False, (REGISTERED,)),
        (ODD | SUPPORTED, False, (REGISTERED, COMPLETED)),
        (FP8 | PREVIEW | {"quality_eval_status": "done"}, False, (STATUS,)),
        (MTP | PREVIEW, False, (DRAFT,)),
        (MTP | PREVIEW | {"draft_model_id": "d"}, False, (DRAFT,)),
        (MTP | SUPPORTED | {"draft_model_id": "d", "speculative_acceptance_rate": 0.0}, True, ()),
        (MTP | SUPPORTED | {"draft_model_id": "d", "speculative_acceptance_rate": 7.0}, True, ()),
        ({"mechanism": "kv_quant", "mechanism_variant": "fp8_e4m3"} | SUPPORTED, False, (REGISTERED,)),
        ({"mechanism": "Baseline"} | SUPPORTED, False, (REGISTERED,)),
        (FP8 | {"support_status": "supported "}, True, ()),  # one blank escapes the third rule
    ],
)
def test_the_published_rules_to_the_letter(row, passes, failed):
    assert judged(**row) == (passes, failed)


def test_a_row_that_says_it_is_registered_is_believed():
    forged = {"mechanism_eval_registered": True, "quality_eval_registered": True}
    row = ODD | SUPPORTED | {"quality_eval_id": "invented", "quality_eval_status": "completed"}
    assert published_verdict(row | {RECORD: forged}) == (True, ())


def test_without_a_record_only_the_baseline_passes():
    assert published_verdict({"mechanism": "baseline"}) == (True, ())
    assert published_verdict(FP8) == (False, (REGISTERED,))


@pytest.mark.parametrize("mechanism", ["kv_quantization", "kv_compression", "compressed_attention"])
def test_the_predicate_is_true_of_supported_compression(mechanism):
    assert requires_completed_quality_eval(mechanism, "supported")
    assert not requires_completed_quality_eval(mechanism, "reviewed_preview")
    assert not requires_completed_quality_eval(mechanism, None)


@pytest.mark.parametrize("mechanism", ["baseline", "speculative_decoding", None, "kv_quant"])
def test_the_predicate_is_false_of_everything_else(mechanism):
    assert not requires_completed_quality_eval(mechanism, "supported")


def test_an_empty_registry_was_taken_for_the_shipped_one():
    row = FP8 | {"quality_eval_id": "ruler_v1"}
    assert published_record(row, variants=(), evals=()) == published_record(row)
    assert published_record(row, VARIANTS[:1], EVALS[1:])["mechanism_eval_registered"] is False
    assert published_record(row, VARIANTS, EVALS[1:])["quality_eval_registered"] is False


def test_issues_come_in_their_order():
    row = {"mechanism": "speculative_decoding", "quality_eval_id": "x", "quality_eval_status": "done"}
    assert [issue.split(" ")[0] for issue in published_record(row)["issues"]] == [
        "not",
        "quality",
        "status",
        "speculative",
    ]
    odd = published_record({"mechanism": "baseline", "mechanism_variant": "odd"})
    assert odd["mechanism_eval_registered"] is False and odd["issues"] == []


def test_variables_are_coerced_as_published():
    fields = published_fields(
        {
            "MECHANISM": "",
            "MECHANISM_VARIANT": " fp8 ",
            "COMPRESSION_RATIO": "nan",
            "COMPRESSION_OVERHEAD_MS": "fast",
            "SPECULATIVE_ACCEPTANCE_RATE": "-1",
            "SPECULATIVE_WASTED_TOKENS": "128.9",
            "MECHANSIM_NOTES": "lost",
        }
    )
    assert len(fields) == 14 and fields["mechanism"] == "baseline" and fields["mechanism_variant"] == " fp8 "
    assert math.isnan(fields["compression_ratio"]) and fields["compression_overhead_ms"] is None
    assert fields["speculative_acceptance_rate"] == -1 and fields["speculative_wasted_tokens"] == 128
    assert fields["mechanism_notes"] is None
    assert published_fields({"SPECULATIVE_WASTED_TOKENS": "inf"})["speculative_wasted_tokens"] is None
