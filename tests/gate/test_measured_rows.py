"""Rows and evidence out of records: what a record says arrives, and the gate gives each row what it has earned."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from gate.planted_records import (
    ABSENT,
    BASE,
    GOOD,
    LOSSY,
    NEEDLES,
    OWN,
    PAGED,
    PLAIN_POOL,
    VALUES,
    WINDOWS,
    claims,
    plant,
    read_back,
    record,
    recounted,
    row,
    scores,
    table,
)
from kvlab.core.errors import Fault, MixedIdentity, NonFinite, StaleResult, StorageError, UnknownName, WitnessDisagrees
from kvlab.core.recipe import digest
from kvlab.core.testimony import Pool
from kvlab.gate import registry
from kvlab.gate.cases import Context
from kvlab.gate.catalogue import EVIDENCE
from kvlab.gate.catalogue.rows import Row, checked_row, read_rows
from kvlab.gate.check import check
from kvlab.gate.evidence import BASELINE_RECIPE, measured, paired, parse
from kvlab.gate.inputs import read_current
from kvlab.gate.rules.counted import band_of
from kvlab.text import needles
from kvlab_pipeline.gate_page.measured_rows import COPIED, RATES, band, current_of, rows_of, texts_hash, write
from kvlab_pipeline.gate_page.page import page
from kvlab_pipeline.gate_page.summary import judged
from kvlab_pipeline.studies.mechanisms.plan import FIDELITY, METRICS, NEEDLE
from kvlab_pipeline.studies.mechanisms.records import read_mechanisms, write_mechanisms
from refusals import refused, refused_in_one_line

REGISTRY = registry.load()
RULER = {"model_hash": "a", "items_hash": "z"}


def rows(*given, missing=(), quality=None, **changed):
    return rows_of(record(rows=given, missing=missing, **changed), table(*given, **(quality or {})), "supported")


def written(tmp_path, **changed):
    """Rows and context as the gate takes them, written and read again."""
    files = plant(tmp_path)
    asked = {"code": "c0de", "claim": "supported"} | changed
    out, current = tmp_path / "rows.json", tmp_path / "current.json"
    write([files["hf"], files["vllm"]], files["windows"], files["needles"], **asked, out=out, current=current)
    return read_rows(out), Context(REGISTRY, read_current(current))


# ------------------------------------------------------------------------------- what is earned


def test_each_planted_row_earns_its_tier(tmp_path):
    found = claims(*written(tmp_path))
    assert {name: claim.earned for name, claim in found.items()} == {
        "reference/hf/baseline": "supported",
        "reference/hf/klt-4": "supported",
        "reference/hf/int-2": "too_lossy",
        "reference/vllm/baseline": "supported",
        "reference/vllm/klt-4": "supported",
        "reference/vllm/fp8_e4m3": "supported",
        "reference/vllm/fp8_e5m2": "unsupported",
    }
    assert found["reference/hf/klt-4"].status == "completed" and not found["reference/hf/klt-4"].findings
    lossy = found["reference/hf/int-2"]
    assert lossy.status == "failed" and lossy.codes == {"quality_beyond"}
    assert {j.key: j.word for j in lossy.judgements} == dict.fromkeys(
        ("kl", "delta_nll", "top1_agreement", "needle_recall"), "beyond"
    )


def test_everything_that_was_run_is_judged(tmp_path):
    """A row names one eval, and another that finds a loss keeps it from its claim all the same."""
    given = (BASE, GOOD)
    for lost, earned in ((0, "supported"), (60, "too_lossy")):
        made = rows(*given, quality={"klt 4": {"kl": 0.002, "disagreeing": 0.01, "lost": lost}})
        found = claims(read_back(tmp_path, made), Context(REGISTRY))
        assert found["reference/hf/klt-4"].row["quality_eval_id"] == FIDELITY
        assert found["reference/hf/klt-4"].earned == earned


def test_what_was_measured_with_other_code_is_stale(tmp_path):
    found = claims(*written(tmp_path, code="0ther"))
    assert "evidence_stale_code" in found["reference/hf/klt-4"].codes and found["reference/hf/klt-4"].earned == "gated"
    assert found["reference/hf/baseline"].earned == "supported"  # it loses nothing to itself


@pytest.mark.parametrize(
    ("name", "key", "code"),
    [
        ("windows", "corpus_hash", "evidence_stale_corpus"),
        ("needles", "needles_hash", "evidence_stale_corpus"),
        ("ruler", "items_hash", "evidence_stale_corpus"),
        ("both", "model_hash", "evidence_stale_model"),
    ],
)
def test_what_was_measured_on_other_texts_or_weights_is_stale(tmp_path, name, key, code):
    files = plant(tmp_path)
    for one in ("windows", "needles", "ruler") if name == "both" else (name,):
        files[one].write_text(json.dumps(json.loads(files[one].read_text()) | {key: "new"}))
    out, current = tmp_path / "rows.json", tmp_path / "current.json"
    write([files["hf"]], files["windows"], files["needles"], "c0de", "supported", out, current)
    found = claims(read_rows(out), Context(REGISTRY, read_current(current)))
    assert code in found["reference/hf/klt-4"].codes


def test_a_codec_that_fired_less_often_fails_hard(tmp_path):
    idle = GOOD.model_copy(update={"fires": 1})
    found = claims(read_back(tmp_path, rows(BASE, idle)), Context(REGISTRY))["reference/hf/klt-4"]
    assert found.earned == "unsupported" and "fires_other" in found.codes


@pytest.mark.parametrize(("drift", "earned"), [(1.03, "supported"), (1.1, "unsupported")])
def test_other_texts_may_take_other_bytes_but_not_many(tmp_path, drift, earned):
    drifting = row("klt 4", "kv_compression", "klt", 4, 4.25, fires=6, drift=drift)
    found = claims(read_back(tmp_path, rows(BASE, drifting)), Context(REGISTRY))["reference/hf/klt-4"]
    assert found.earned == earned and ("evidence_contradicts_row" in found.codes) is (earned == "unsupported")


def test_the_metrics_are_those_of_the_shipped_registry():
    assert RATES.keys() == METRICS.keys() <= REGISTRY.evals.keys()
    for name in METRICS:
        assert {metric.key for metric in REGISTRY.evals[name].metrics} == set(METRICS[name])


def test_evidence_is_of_the_version_that_was_run():
    assert REGISTRY.evals[NEEDLE].version == needles.VERSION
    newer = tuple(run.model_copy(update={"version": "9"}) for run in GOOD.evals)
    made = rows(BASE, GOOD.model_copy(update={"evals": newer}))[1]
    assert {parse(piece).version for piece in made[EVIDENCE]} == {"9"}
    row = Row(checked_row({name: value for name, value in made.items() if name != EVIDENCE}), tuple(made[EVIDENCE]))
    (claim,) = check([row], Context(REGISTRY)).claims
    assert "evidence_other_version" in claim.codes and claim.earned == "gated"


# ---------------------------------------------------------------------- pages of an engine's own


def judged_pages(tmp_path, row=PAGED):
    """What coded pages earn beside the engine as it is."""
    return claims(read_back(tmp_path, rows(VLLM, row, engine="vllm")), Context(REGISTRY))["reference/vllm/klt-4-pages"]


VLLM = BASE.model_copy(update={"pool": PLAIN_POOL, "backend": "vllm.CPUAttentionBackendImpl"})


def test_coded_pages_earn_support_by_the_engines_own_account(tmp_path):
    found = judged_pages(tmp_path)
    assert (found.earned, found.status, found.findings) == ("supported", "completed", ())
    (made,) = rows(PAGED, engine="vllm")
    assert made["capacity_tokens"] == PAGED.pool.capacity_tokens == 60 * 128


SPARSE = "block_sparse:block=16,top_k=6,window=64"


def reading_less():
    """Attention that reads a quarter of a whole pass, K and V stored as they are; counted are the contexts."""
    made = row(SPARSE, "compressed_attention", "block_sparse", scope="attention", pattern=SPARSE, canary_kl=2.0)
    runs = tuple(recounted(run, read_bytes=run.kv_bytes // 4) for run in made.evals)
    more = {"evals": runs, "read_bytes": runs[0].read_bytes, "protocol": "in_forward"}
    return made.model_copy(update=more)


@pytest.mark.parametrize("other", [VLLM.model_copy(update={"protocol": "in_forward"}), reading_less()])
def test_what_stores_all_as_the_engine_does_may_count_contexts_in_the_forward(tmp_path, other):
    """vLLM's own cache as it is, and attention by a pattern: nothing of theirs is stored otherwise."""
    given, quality = (VLLM, other) if other.pattern else (other,), {SPARSE: {"kl": 0.002, "disagreeing": 0.01}}
    found = claims(read_back(tmp_path, rows(*given, engine="vllm", quality=quality)), Context(REGISTRY))
    assert {claim.earned for claim in found.values()} == {"supported"}, [c.findings for c in found.values()]


def test_capacity_is_told_beside_the_engines_own(tmp_path):
    _, summary = judged(read_back(tmp_path, rows(VLLM, PAGED, GOOD, engine="vllm")), Context(REGISTRY))
    told = {line.row_id.rpartition("/")[2]: line.capacity_ratio for line in summary.rows}
    assert told == {"baseline": 1.0, "klt-4-pages": 60 / 16, "klt-4": None}
    lines = {line["name"]: line["capacity"] for place in page(summary)["places"] for line in place["lines"]}
    assert lines == {"baseline": "1.00", "kv_compression/klt_pages": "3.75", "kv_compression/klt": "–"}


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"backend": "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"}, "backend_other"),
        ({"backend": None}, "evidence_pages"),
        ({"pool": None}, "evidence_pages"),
        ({"served": None}, "evidence_pages"),
        ({"served": PAGED.served.model_copy(update={"calibration": "another fit"})}, "evidence_other_served"),
        ({"served": PAGED.served.model_copy(update={"recipe_id": "another one"})}, "evidence_other_served"),
        ({"pool": PAGED.pool.model_copy(update={"block_bytes": 2 * PAGED.pool.block_bytes})}, "page_other"),
        ({"pool": PAGED.pool.model_copy(update={"cache_blocks": 10**6})}, "capacity_other"),
        ({"kv_cache_dtype": "bfloat16"}, "observed_dtype_other"),
        ({"canary_kl": 0.0}, "evidence_canary"),
        ({"codec": None, "canary_kl": None}, "evidence_pages"),
    ],
)
def test_a_claim_of_pages_is_not_supported_without_them(tmp_path, changed, code):
    found = judged_pages(tmp_path, PAGED.model_copy(update=changed))
    assert code in found.codes | {reason.code for one in found.findings for reason in one.reasons}
    assert found.earned != "supported"


EXACT = PAGED.pool.block_bytes  # as many bytes as a page takes


def keeping(exact: int = EXACT, counted: int = EXACT, memory: int | None = None, requests: int = 1):
    """Coded pages beside which `exact` bytes of each window are read exact, of which `counted` were counted."""
    own, pool = PAGED.evals, PAGED.pool
    runs = tuple(recounted(run, kv_bytes=run.kv_bytes + run.items * counted) for run in own)
    blocks = ((pool.cache_memory_bytes if memory is None else memory) - exact) // pool.block_bytes
    more = {"exact_bytes": exact, "exact_requests": requests, "cache_blocks": blocks}
    return PAGED.model_copy(update={"evals": runs, "kv_bytes": runs[0].kv_bytes, "pool": pool.model_copy(update=more)})


def test_exact_tokens_beside_pages_are_counted_in_bytes_and_in_memory(tmp_path):
    assert judged_pages(tmp_path, keeping()).earned == "supported"
    (made,) = rows(keeping(), engine="vllm")
    (plain,) = rows(PAGED, engine="vllm")
    assert (made["exact_bytes"], made["exact_requests"]) == (EXACT, 1) and "exact_bytes" not in plain
    assert made["bits_per_value"] > plain["bits_per_value"]
    one, other = PAGED.pool, keeping().pool
    assert Pool(**one.model_dump()) == one and "exact_bytes" not in one.model_dump()
    assert Pool(**other.model_dump()) == other and other.capacity_tokens < one.capacity_tokens


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"exact": 10**9, "memory": 10**9 + PAGED.pool.cache_memory_bytes}, "page_other"),
        ({"memory": EXACT + PAGED.pool.cache_memory_bytes}, "capacity_other"),
        ({"requests": 50}, "capacity_other"),
    ],
)
def test_exact_tokens_that_are_not_counted_are_found(tmp_path, changed, code):
    found = judged_pages(tmp_path, keeping(**changed))
    assert code in found.codes | {reason.code for one in found.findings for reason in one.reasons}
    assert found.earned != "supported"


def test_a_record_that_leaves_exact_tokens_out_of_its_bytes_is_refused(tmp_path):
    for counted in (0, EXACT - 1):
        short = keeping(counted=counted)
        write_mechanisms(tmp_path / "vllm", record("vllm", [VLLM, short]), table(VLLM, short))
        with refused(Fault, "fault.page-bytes", "klt 4 pages", "kv_fidelity"):
            read_mechanisms(tmp_path / "vllm.json")
    write_mechanisms(tmp_path / "vllm", record("vllm", [VLLM, keeping()]), table(VLLM, keeping()))
    assert read_mechanisms(tmp_path / "vllm.json")[0].rows[1] == keeping()


def test_what_ran_beside_the_cache_is_no_evidence_of_pages(tmp_path):
    """The same codec, recipe and protocol through hooks: its evidence says so, and its row cannot be called pages."""
    beside = PAGED.model_copy(
        update={"backend": None, "pool": None, "served": None, "kv_cache_dtype": "bfloat16", "cache_class": "CPU"}
    )
    assert judged_pages(tmp_path, beside).earned == "unsupported"
    whole, simulated = rows(PAGED, engine="vllm")[0], rows(beside, engine="vllm")[0]
    (found,) = claims(read_back(tmp_path, [whole | {EVIDENCE: simulated[EVIDENCE]}]), Context(REGISTRY)).values()
    assert found.earned == "unsupported" and "evidence_contradicts_row" in found.codes


def test_a_record_whose_bytes_are_not_those_of_its_pages_is_refused(tmp_path):
    smaller = PAGED.model_copy(
        update={"pool": PAGED.pool.model_copy(update={"block_bytes": PAGED.pool.block_bytes + 1})}
    )
    write_mechanisms(tmp_path / "vllm", record("vllm", [VLLM, smaller]), table(VLLM, smaller))
    with refused(Fault, "fault.page-bytes", "klt 4 pages", "kv_fidelity"):
        read_mechanisms(tmp_path / "vllm.json")


def test_pages_need_no_witness_of_their_own(tmp_path):
    """What is not run beside the engine's cache has no tap to be witnessed; its canary and its counts speak for it."""
    write_mechanisms(tmp_path / "vllm", record("vllm", [VLLM, PAGED], witnessed=()), table(VLLM, PAGED))
    assert read_mechanisms(tmp_path / "vllm.json")[0].rows[1] == PAGED


SENTINELS = {
    "label": "klt 3",
    "mechanism": "kv_compression",
    "mechanism_variant": "klt",
    "method": "klt",
    "scope": "kv_cache",
    "bits": 3,
    "protocol": "in_forward",
    "recipe_id": "planted-recipe",
    "kv_cache_dtype": "bfloat16",
    "cache_class": "PlantedCache",
    "codec": "klt",
    "throughput_tok_s": 1111.5,
    "seconds": (1.0, 2.0),
    "span": "window",
    "compression_overhead_ms": 3.25,
    "decompression_overhead_ms": 4.25,
    "canary_kl": 5.25,
    "fires": 66,
    "expected_fires": 77,
    "kv_bytes": 1_000_008,
    "kv_values": 2_000_016,
    "backend": "planted.Backend",
    "pool": PAGED.pool,
    "served": PAGED.served,
    "pattern": "planted:of=3",
    "read_bytes": 500_004,
    "witnessed_kl": 0.000_012,
}
NOT_IN_A_ROW = {"label", "seconds", "canary_kl", "pool", "served", "witnessed_kl"}
OWN_NAMES = {"span": "stored_span", "method": "compression_method", "scope": "compression_scope"}


def test_every_field_of_a_record_s_row_arrives_unchanged():
    planted = GOOD.model_copy(update=SENTINELS)
    assert SENTINELS.keys() == type(GOOD).model_fields.keys() - {"evals"}
    (made,) = rows_of(record(rows=[planted]), scores("klt 3", kl=0.01), "gated")
    arrived = {name: made[OWN_NAMES.get(name, name)] for name in SENTINELS.keys() - NOT_IN_A_ROW}
    assert arrived == {name: SENTINELS[name] for name in arrived}
    assert made["row_id"] == "reference/hf/klt-3" and made["support_status"] == "gated"
    assert made["bits_per_value"] == 8 * 1_000_008 / 2_000_016
    assert made["compression_ratio"] == made["bits_per_value"] / 16
    assert set(COPIED) <= made.keys()
    assert PAGED.pool.model_dump().items() <= made.items()
    assert made["capacity_tokens"] == PAGED.pool.cache_blocks * PAGED.pool.block_tokens
    for piece in map(parse, made[EVIDENCE]):
        assert (piece.observed.backend, piece.observed.pool, piece.observed.served) == (
            "planted.Backend",
            PAGED.pool,
            PAGED.served,
        )


def test_every_field_of_a_record_s_provenance_arrives_in_row_and_evidence():
    told = {"model": "planted", "model_hash": "weights", "device": "cuda", "code": "commit", "dtype": "float32"}
    found = record(engine="vllm", rows=[GOOD], context=2048, versions={"vllm": "9"}, **told)
    (made,) = rows_of(found, table(GOOD), "supported")
    expected = (
        told
        | {"calibration": digest({"hf": "ca11"})}
        | {"engine": "vllm", "context_tokens": 2048, "corpus_hash": texts_hash("7e47", "2eed1e", "7ex7")}
    )
    assert expected.items() <= made.items()
    for piece in map(parse, made[EVIDENCE]):
        identity = expected | {"protocol": "snapshot", "recipe_id": GOOD.recipe_id, "versions": {"vllm": "9"}}
        assert piece.identity.model_dump() == identity
        assert piece.baseline_identity.model_dump() == identity | {"recipe_id": BASELINE_RECIPE}
        assert piece.baseline_recipe_id == BASELINE_RECIPE


def test_evidence_is_made_of_the_scores_item_by_item():
    made = rows(BASE, LOSSY)[1]
    fidelity, needle = map(parse, made[EVIDENCE])
    given = scores("int 2", kl=0.2, disagreeing=0.2, lost=80)
    for piece, name, rate in ((fidelity, FIDELITY, False), (needle, NEEDLE, True)):
        assert piece.quality_eval_id == name and piece.metrics.keys() == set(METRICS[name])
        for metric in METRICS[name]:
            mine = given.filter(metric=metric)
            variant, baseline = mine["variant"].to_numpy(), mine["baseline"].to_numpy()
            assert piece.metrics[metric] == measured(variant, rate)
            assert piece.baseline[metric] == measured(baseline, rate)
            assert piece.paired[metric] == paired(variant, baseline, rate)
    assert (fidelity.metrics["kl"].n, needle.metrics["needle_recall"].n) == (WINDOWS, NEEDLES)
    assert made["kl"] == fidelity.metrics["kl"].value
    assert fidelity.observed.fires == LOSSY.evals[0].fires and needle.observed.fires == LOSSY.evals[1].fires


def test_the_order_of_the_scores_does_not_matter():
    given = (BASE, GOOD)
    shuffled = table(*given).sample(fraction=1.0, shuffle=True, seed=1)
    assert rows_of(record(rows=given), shuffled, "supported") == rows(*given)


def test_the_baseline_shows_its_numbers():
    made = rows(BASE)[0]
    assert not made.keys() & {"mechanism_variant", "compression_ratio", "quality_eval_id"}
    (piece,) = map(parse, made[EVIDENCE])
    assert piece.quality_eval_id == FIDELITY and {m.value for m in piece.metrics.values()} == {0.0, 1.0}
    assert (made["kl"], made["delta_nll"], made["top1_agreement"]) == (0, 0, 1)
    assert made["bits_per_value"] == 16 and made["recipe_id"] == BASELINE_RECIPE


def test_the_canary_arrives_in_the_evidence():
    assert {parse(piece).observed.canary_kl for piece in rows(BASE, GOOD)[1][EVIDENCE]} == {GOOD.canary_kl}


def test_without_a_calibration_there_is_none_to_name():
    made = rows(BASE, GOOD, calibration={})[1]
    assert "calibration" not in made and parse(made[EVIDENCE][0]).identity.calibration is None


def test_an_engine_s_own_cache_has_no_codec():
    made = rows(BASE, OWN)[1]
    assert "codec" not in made and made["kv_cache_dtype"] == "fp8_e4m3" and made["compression_ratio"] == 0.5
    assert parse(made[EVIDENCE][0]).baseline_identity.protocol == made["protocol"] == "in_forward"


def test_what_could_not_be_measured_says_why_on_one_line():
    made = rows(BASE, missing=[ABSENT])[1]
    assert made["support_status"] == "unsupported" and "throughput_tok_s" not in made and EVIDENCE not in made
    assert made["mechanism_notes"] == "no AVX-512 | <b>here</b>"
    long = ABSENT.model_copy(update={"reason": "x" * 5000})
    assert len(rows(BASE, missing=[long])[1]["mechanism_notes"]) == 4096


@pytest.mark.parametrize("tokens", [1, 512, 1000, 1024, 4096, 8000, 8192, 131072])
def test_the_band_holds_the_context(tokens):
    low, high = band_of(band(tokens))
    assert low <= tokens <= high


def test_equal_records_give_equal_bytes(tmp_path):
    seen = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written(tmp_path / name)
        seen.add(((tmp_path / name / "rows.json").read_bytes(), (tmp_path / name / "current.json").read_bytes()))
    assert len(seen) == 1


def test_rows_of_one_measurement_share_a_run_and_others_have_another():
    assert len({made["run"] for made in rows(BASE, GOOD)}) == 1
    runs = {
        rows(BASE, **changed)[0]["run"] for changed in ({}, {"code": "x"}, {"model_hash": "x"}, {"needles_hash": "x"})
    }
    assert len(runs) == 4


# -------------------------------------------------------------------------------------- refusals


def test_records_of_two_models_are_refused(tmp_path):
    files = plant(tmp_path)
    other = record("vllm", [BASE], model="other")
    write_mechanisms(files["vllm"], other, table(BASE))
    with refused(MixedIdentity, None, "model: other | reference"):
        write(
            [files["hf"], files["vllm"]],
            files["windows"],
            files["needles"],
            "c",
            "gated",
            tmp_path / "r",
            tmp_path / "c",
        )
    assert not (tmp_path / "r").exists() and not (tmp_path / "c").exists()


def test_windows_and_needles_of_two_models_are_refused():
    with pytest.raises(MixedIdentity):
        current_of({"model_hash": "a", "corpus_hash": "x"}, {"model_hash": "b", "needles_hash": "y"}, RULER, "c")
    with refused(StorageError, "storage.missing-field", "needles_hash"):
        current_of({"model_hash": "a", "corpus_hash": "x"}, {"model_hash": "a"}, RULER, "c")


@pytest.mark.parametrize(
    ("spoilt", "error"),
    [
        (lambda scores: scores.filter(pl.col("metric") != "delta_nll"), StorageError),
        (lambda scores: scores.filter(pl.col("label") != "klt 4"), StorageError),
        (lambda scores: pl.concat([scores, scores]), StorageError),
        (lambda scores: scores.with_columns(variant=pl.lit(np.nan)), NonFinite),
        (lambda scores: scores.with_columns(variant=pl.col("variant") + 0.5), NonFinite),  # a needle found by half
        (lambda scores: scores.filter(pl.col("item") == 0), StorageError),
        (lambda scores: scores.with_columns(item=pl.col("item") + 1), StorageError),
        (lambda scores: scores.with_columns(label=pl.lit("klt 5")), StorageError),
        (lambda scores: pl.concat([scores, scores.with_columns(label=pl.lit("klt 5"))]), StorageError),
    ],
)
def test_scores_that_carry_nothing_are_refused(spoilt, error):
    with pytest.raises(error):
        rows_of(record(rows=[GOOD]), spoilt(table(GOOD)), "supported")


def test_an_eval_or_dtype_that_nobody_knows_is_refused():
    strange = GOOD.evals[0].model_copy(update={"quality_eval_id": "vibes"})
    with refused(StorageError, "storage.unknown-eval", "'vibes'"):
        rows_of(record(rows=[GOOD.model_copy(update={"evals": (strange,)})]), table(GOOD), "supported")
    with refused(UnknownName, None, "float8"):
        rows_of(record(rows=[GOOD], dtype="float8"), table(GOOD), "supported")


LOSING = {"klt 4": {"kl": 0.002, "disagreeing": 0.01, "lost": 60}}


def attacked(tmp_path, change, rewritten=lambda record: record):
    """Write rows of a table in which somebody made a loss of sixty needles go away."""
    files, given = plant(tmp_path), (BASE, GOOD)
    write_mechanisms(files["hf"], rewritten(record("hf", given)), change(table(*given, **LOSING)))
    out = (tmp_path / "rows.json", tmp_path / "now.json")
    write([files["hf"]], files["windows"], files["needles"], "c0de", "supported", *out)


def lost_needles(scores):
    return (
        (pl.col("label") == "klt 4") & (pl.col("metric") == "needle_recall") & (pl.col("variant") < pl.col("baseline"))
    )


def asked_fewer(record):
    """The record says that sixty needles less were asked."""
    runs = tuple(
        recounted(run, items=NEEDLES - 60, kv_values=(NEEDLES - 60) * VALUES) if run.quality_eval_id == NEEDLE else run
        for run in GOOD.evals
    )
    return record.model_copy(update={"rows": (BASE, GOOD.model_copy(update={"evals": runs}))})


def without_needles(record):
    return record.model_copy(update={"rows": (BASE, GOOD.model_copy(update={"evals": GOOD.evals[:1]}))})


def renumbered(scores):
    """Without the lost needles, the others numbered from zero again."""
    kept = scores.filter(~lost_needles(scores)).sort("label", "quality_eval_id", "metric", "item")
    return kept.with_columns(item=pl.int_range(pl.len(), dtype=pl.Int32).over("label", "quality_eval_id", "metric"))


def own_baseline(scores):
    """The needles that were lost are lost by the baseline too."""
    return scores.with_columns(
        baseline=pl.when(lost_needles(scores)).then(pl.col("variant")).otherwise(pl.col("baseline"))
    )


@pytest.mark.parametrize(
    ("change", "rewritten", "code", "data"),
    [
        (
            lambda scores: scores.filter(~lost_needles(scores)),
            lambda record: record,
            "storage.scores-missing",
            "340 scores of 340 items",
        ),
        (renumbered, asked_fewer, "storage.other-items", "'needle': 340"),
        (own_baseline, lambda record: record, "storage.other-baseline", "needle_recall"),
        (lambda scores: scores, without_needles, "storage.other-items", "klt 4"),
    ],
)
def test_a_loss_cannot_be_taken_out_of_the_table(tmp_path, change, rewritten, code, data):
    with refused_in_one_line(StorageError, code, data):
        attacked(tmp_path, change, rewritten)
    assert not (tmp_path / "rows.json").exists()


def test_that_loss_is_found_where_it_is_left_in(tmp_path):
    attacked(tmp_path, lambda scores: scores)
    found = claims(read_rows(tmp_path / "rows.json"), Context(REGISTRY))["reference/hf/klt-4"]
    assert found.earned == "too_lossy" and {j.key for j in found.judgements if j.word == "beyond"} == {"needle_recall"}


def test_windows_and_needles_say_how_many_they_are(tmp_path):
    files = plant(tmp_path)
    for name, key in (("windows", "windows"), ("needles", "n")):
        said = json.loads(files[name].read_text())
        files[name].write_text(json.dumps({one: value for one, value in said.items() if one != key}))
        with refused(StorageError, "storage.missing-field", f"'{key}'"):
            write([files["hf"]], files["windows"], files["needles"], "c", "gated", tmp_path / "r", tmp_path / "c")
        files[name].write_text(json.dumps(said))


def half(row):
    """The same row in half of its bytes, in every eval."""
    runs = tuple(recounted(run, kv_bytes=run.kv_bytes // 2) for run in row.evals)
    return row.model_copy(update={"kv_bytes": row.kv_bytes // 2, "evals": runs})


@pytest.mark.parametrize(
    ("spoilt", "code"),
    [
        (lambda row: row.model_copy(update={"throughput_tok_s": 1000 * row.throughput_tok_s}), "fault.throughput"),
        (lambda row: row.model_copy(update={"kv_bytes": row.kv_bytes // 2}), "fault.counts"),
        (half, "fault.too-few-bits"),
    ],
)
def test_a_row_that_contradicts_itself_is_no_measurement(tmp_path, spoilt, code):
    rows = (BASE, spoilt(GOOD))
    write_mechanisms(tmp_path / "x.parquet", record(rows=rows), table(*rows))
    with refused(Fault, code, GOOD.label):
        read_mechanisms(tmp_path / "x.json")


def test_a_record_names_its_table_and_its_witness(tmp_path):
    out = tmp_path / "x.parquet"
    write_mechanisms(out, record(rows=(BASE, GOOD)), table(BASE, GOOD))
    read_mechanisms(out)
    table(BASE, GOOD, **LOSING).write_parquet(out)
    with refused(StaleResult, "stale.other-table"):
        read_mechanisms(out)
    write_mechanisms(out, record(rows=(BASE, GOOD), witnessed=()), table(BASE, GOOD))
    with refused(WitnessDisagrees, "witness.none"):
        read_mechanisms(out)
