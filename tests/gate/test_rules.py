import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.test_check import CASE, CONTEXT, TIGHT, claim, context, row
from kvlab.gate import registry
from kvlab.gate.cases import DTYPE_BITS, Case
from kvlab.gate.catalogue.columns import TIERS
from kvlab.gate.catalogue.rows import Row, checked_row
from kvlab.gate.check import check
from kvlab.gate.reasons import EVIDENCE_REASONS
from kvlab.gate.registry.faults import NATIVE_DTYPES
from kvlab.gate.rules import CRITERIA, FALSEHOODS, WAIVABLE, Context
from kvlab.gate.rules.counted import band_of
from validation.gate.corruptions import valid_case
from validation.gate.passing_case import VALUES

BY_NAME = {criterion.name: criterion for criterion in CRITERIA}


def codes(name, given, where=CONTEXT):
    return [reason.code for reason in BY_NAME[name].reasons(Case(given, where))]


def test_every_criterion_is_in_order():
    assert [criterion.number for criterion in CRITERIA] == list(range(len(CRITERIA)))
    for criterion in CRITERIA:
        assert criterion.ceiling in TIERS[1:] and criterion.why and "\n" not in criterion.why
        assert (criterion.name in WAIVABLE) != criterion.hard
    assert set(EVIDENCE_REASONS) >= FALSEHOODS and set(DTYPE_BITS) == set(NATIVE_DTYPES)


def test_a_valid_row_meets_every_criterion():
    for name in ("baseline", "fp8", "int", "class", "mtp"):
        assert [c.name for c in CRITERIA if c.reasons(Case(row(name), CONTEXT))] == []


# ------------------------------------------------------------------------- declared


def test_an_empty_registry_registers_nothing():
    empty = Context(registry.parse({}, {}))
    found = claim(row("fp8"), empty)
    assert {"variant_unregistered", "eval_unregistered"} <= found.codes and found.earned == "artifact_only"
    assert "baseline_variant" in claim(row("baseline"), empty).codes


def test_the_nearest_name_is_said():
    (reason,) = BY_NAME["mechanism_variant registered"].reasons(Case(row("fp8", mechanism_variant="fp8_e4m4"), CONTEXT))
    assert "did you mean 'fp8_e4m3'?" in reason.said
    (reason,) = BY_NAME["quality_eval_id registered"].reasons(Case(row("fp8", quality_eval_id="neddle"), CONTEXT))
    assert "did you mean 'needle'?" in reason.said


@pytest.mark.parametrize(
    ("record", "changes", "found"),
    [
        (None, {"mechanism_variant": "invented"}, []),
        ({"mechanism_eval_registered": True}, {}, []),
        ({"mechanism_eval_registered": False}, {}, []),  # older than the entry: that is no overstatement
        ({"mechanism_eval_registered": True}, {"mechanism_variant": "invented"}, ["embedded_overstates"]),
        ({"mechanism_eval_registered": "yes"}, {"mechanism_variant": "invented"}, []),
        ({"quality_eval_registered": True}, {"quality_eval_id": "invented"}, ["embedded_overstates"]),
    ],
)
def test_a_record_of_its_own_is_held_against_the_registry(record, changes, found):
    given = row("fp8", **changes)
    assert codes("own record overstates nothing", Row(given.values, given.evidence, record)) == found


@pytest.mark.parametrize("record", [None, {"mechanism_eval_registered": True, "quality_eval_registered": True}])
def test_what_a_row_says_of_itself_changes_nothing_else(record):
    given = row("fp8", evidence=False)
    assert claim(Row(given.values, (), record)).codes == claim(given).codes


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"compression_ratio": 1.0}, []),
        ({"compression_ratio": 0.5}, ["compression_undeclared"]),
        ({"compression_scope": "kv_cache"}, ["compression_undeclared"]),
        ({"speculative_wasted_tokens": 0}, ["draft_undeclared"]),
    ],
)
def test_fields_of_a_mechanism_without_it(changes, found):
    assert codes("declaration agrees with the registry", row("baseline", **changes)) == found
    undeclared = row("baseline", mechanism=..., **changes)
    assert claim(undeclared).word == ("fail" if found else "not_applicable")


def test_what_is_not_said_of_method_and_scope_is_not_wrong():
    assert codes("declaration agrees with the registry", row("int")) == []
    assert codes("declaration agrees with the registry", row("int", compression_method="fp8_e4m3")) == ["method_other"]


# ------------------------------------------------------------------------- observed


@pytest.mark.parametrize("dtype", [*NATIVE_DTYPES, "auto", None])
def test_a_native_cache_needs_no_declaration(dtype):
    assert codes("what ran was declared", row("baseline", kv_cache_dtype=dtype)) == []


@pytest.mark.parametrize("dtype", ["auto", None])
def test_a_request_is_no_observation(dtype):
    without = dict.fromkeys(("kv_bytes", "kv_values", "context_tokens", "context_band"))
    given = row("baseline", evidence=False, kv_cache_dtype=dtype, **without)
    assert codes("what ran was observed", given) == ["observation_missing"]
    assert claim(given).earned == "reviewed_preview"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"codec": "identity", "fires": 96}, []),  # passes everything through
        ({"codec": "none"}, []),
        ({"codec": "", "fires": 0}, []),
        ({"cache_class": "DynamicCache"}, []),
        ({"cache_class": "QuantoQuantizedCache"}, ["undeclared_cache"]),
        ({"cache_class": "SinkCache"}, ["undeclared_cache"]),
        ({"kv_bytes": 2 * CASE["rows"]["baseline"]["kv_bytes"]}, []),
        ({"dtype": "float32"}, ["undeclared_bytes"]),  # sixteen bits of thirty-two
        ({"dtype": "unheard"}, []),
        ({"kv_values": 0}, []),
        ({"spec_decoding": None}, []),
        ({"spec_decoding": "eagle3"}, ["undeclared_speculation"]),
    ],
)
def test_what_ran_after_a_baseline(changes, found):
    assert codes("what ran was declared", row("baseline", **changes)) == found
    assert codes("what ran was declared", row("baseline", mechanism=..., **changes)) == found


def test_a_draft_does_not_excuse_a_coded_cache():
    assert codes("what ran was declared", row("mtp", kv_cache_dtype="fp8")) == ["undeclared_dtype"]


@pytest.mark.parametrize("tier", TIERS)
def test_an_undeclared_run_fails_at_every_tier(tier):
    found = claim(row("baseline", kv_cache_dtype="fp8", support_status=tier))
    assert found.word == "fail" and found.earned == "unsupported"


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        ("fp8", {"kv_cache_dtype": "fp8"}, []),
        ("fp8", {"kv_cache_dtype": None}, []),
        ("fp8", {"kv_cache_dtype": "bfloat16"}, ["observed_dtype_other"]),
        ("fp8", {"codec": "int"}, ["observed_codec_other"]),
        ("int", {"codec": "identity"}, ["codec_absent"]),
        ("int", {"codec": None, "kv_cache_dtype": None}, []),  # nobody looked: another criterion
        ("int", {"fires": 0}, ["codec_idle"]),
        ("int", {"fires": 97}, ["fires_other"]),
        ("int", {"kv_cache_dtype": "fp8"}, ["observed_dtype_other"]),
        ("mtp", {"spec_decoding": "none"}, ["speculation_idle"]),
        ("mtp", {"spec_decoding": "medusa"}, ["speculation_other"]),
        ("mtp", {"spec_decoding": None}, []),
    ],
)
def test_what_was_declared_ran(name, changes, found):
    assert codes("what was declared ran", row(name, **changes)) == found


@pytest.mark.parametrize("other", ["kv_quantization/fp8_e4m3", "kv_compression/klt_pages", "kv_compression/eviction"])
def test_of_several_compressions_each_was_seen_to_run(other):
    """One that ran vouched for all that were named beside it."""
    mechanism, variant = other.split("/")
    both = {
        "mechanism": f"kv_quantization+{mechanism}",
        "mechanism_variant": f"int+{variant}",
        "compression_ratio": None,
    }
    found = claim(row("int", **both))
    assert found.earned == "unsupported" and "part_absent" in found.codes
    alone = row("int", mechanism="kv_quantization+kv_quantization", mechanism_variant="int+turboquant_class")
    assert "part_absent" in claim(alone).codes


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"bits_per_value": 4.83}, []),  # rounded
        ({"bits_per_value": 5.0}, ["bits_other"]),
        ({"compression_ratio": 0.304}, []),
        ({"compression_ratio": 1.7}, ["ratio_other"]),
        ({"compression_ratio": 0.5}, ["ratio_other"]),
        ({"kv_bytes": None, "compression_ratio": 0.5}, ["ratio_other"]),  # from the bits that are shown
        ({"kv_bytes": None, "bits_per_value": None, "compression_ratio": 0.5}, []),
        ({"dtype": "unheard"}, []),
        ({"context_band": "3k-4k"}, []),
        ({"context_band": "4k-4k"}, []),
        ({"context_band": "1k-4k"}, ["band_other"]),  # a context of 4k says nothing of one of 1k
        ({"context_band": "1-1024k"}, ["band_other"]),
        ({"context_band": "3k-5k"}, ["band_other"]),
        ({"context_band": "8k"}, ["band_other"]),
        ({"context_band": "1k-2k"}, ["band_other"]),
        *(({"context_band": odd}, ["band_other"]) for odd in ("long", "4k+", ">=4k", "from 4k", "4k-", "4e3-1e9")),
    ],
)
def test_numbers_agree(changes, found):
    assert codes("numbers agree with one another", row("int", **changes)) == found


@pytest.mark.parametrize(
    ("name", "band"),
    [
        ("32k", (16 * 1024 + 1, 32 * 1024)),
        ("131k", (131 * 512 + 1, 131 * 1024)),
        ("1M", (512 * 1024 + 1, 1024**2)),
        ("8k-32k", (8000, 32 * 1024)),
        ("512-1024", (512, 1024)),
        ("v2", None),
        ("long", None),
        ("1-2-3", None),
        (None, None),
    ],
)
def test_bands(name, band):
    assert band_of(name) == band


@given(st.integers(1, 10**6))
def test_a_band_named_by_its_length_holds_it(tokens):
    low, high = band_of(str(tokens))
    assert low <= tokens <= high and not low <= tokens // 2 <= high


def test_a_cache_that_grew_is_no_support():
    given = row("class", kv_bytes=3 * VALUES, evidence=False, support_status="gated", quality_eval_status=None)
    assert "nothing_saved" in claim(given).codes
    typed = claim(row("class", kv_bytes=3 * VALUES))
    assert typed.earned == "unsupported" and typed.codes == {"nothing_saved", "quantity_other"}


# ------------------------------------------------------------------------- quality


def test_reasons_say_the_numbers():
    (finding,) = claim(row("fp8", quality_eval_status=None), TIGHT).findings
    assert str(finding.reasons[0]) == ("quality_beyond: metrics.kl loses 0.002 [0.001, 0.003], its margin is 0.0005")
    (finding,) = claim(row("fp8", quality_eval_status=None), context(margin=0.0025)).findings
    assert finding.reasons[0].code == "quality_open" and "items settle it" in finding.reasons[0].said


def test_a_floor_that_is_missed_is_said():
    evals = valid_case()["evals"]
    evals["evals"][0]["metrics"][0] |= {"floor": 0.9}  # inside the interval of .8975
    where = Context(registry.parse(CASE["mechanisms"], evals), CASE["current"])
    (reason,) = claim(row("fp8", quality_eval_status=None), where).findings[0].reasons
    assert reason.code == "quality_open" and "may be 0.03648 short of its floor" in reason.said


@pytest.mark.parametrize("typed", [None, "pending", "failed"])
def test_a_status_may_say_less_than_the_evidence(typed):
    assert claim(row("fp8", quality_eval_status=typed)).word == "pass"


@pytest.mark.parametrize(
    ("name", "typed", "where"),
    [("preview", "completed", CONTEXT), ("fp8", "completed", TIGHT), ("fp8", "not_required", CONTEXT)],
)
def test_a_status_may_not_say_more(name, typed, where):
    assert codes("quality_eval_status is derived", row(name, quality_eval_status=typed), where) == ["status_overstated"]


def test_the_baseline_needs_no_status():
    for typed in (None, "not_required", "completed"):
        assert claim(row("baseline", quality_eval_status=typed)).word == "pass"


@pytest.mark.parametrize("tier", TIERS)
def test_altered_evidence_fails_at_every_tier(tier):
    given = row("fp8", support_status=tier)
    forged = given.evidence[0] | {"version": "1 "}
    assert claim(Row(given.values, (forged,))).codes >= {"evidence_tampered"}
    assert claim(Row(given.values, (forged,))).word == "fail"


def test_old_evidence_counts_as_none():
    stale = row("fp8", code="newer commit", quality_eval_status=None)
    assert claim(stale).earned == "gated" and claim(stale).codes == {"evidence_stale_code"}


# ------------------------------------------------------------------------- the shipped registry


def test_a_row_of_the_shipped_registry():
    shipped = Context(registry.load())
    baseline = checked_row({"mechanism": "baseline", "support_status": "supported", "kv_cache_dtype": "bfloat16"})
    assert check([Row(baseline)], shipped, strict=True).verdict == "pass"
    assert check([Row(baseline | {"kv_cache_dtype": "fp8"})], shipped).verdict == "fail"
