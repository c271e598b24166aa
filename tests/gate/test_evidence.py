import copy
import json
import math
import re

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvlab.core.errors import NonFinite, StorageError
from kvlab.core.records import CANARY_MIN, write_json
from kvlab.gate import reasons
from kvlab.gate.catalogue.rows import checked_row
from kvlab.gate.catalogue.values import RowError
from kvlab.gate.evidence import BASELINE_RECIPE, EvidenceError, build, parse, problems, read, status
from kvlab.gate.evidence.measures import change_of, measured, paired
from kvlab.gate.registry import Registry, load
from refusals import refused, refused_in_one_line
from tiers import examples
from validation.gate.passing_case import BACKEND, POOL

SHIPPED = load()
# Here one piece of evidence is looked at by itself; what a mechanism has to show beside it: further below.
REGISTRY = Registry(
    {name: entry.model_copy(update={"must_show": ()}) for name, entry in SHIPPED.mechanisms.items()}, SHIPPED.evals
)
IDENTITY = {
    "model": "small",
    "model_hash": "aaaaaaaaaaaa",
    "engine": "hf",
    "device": "cpu",
    "dtype": "bfloat16",
    "protocol": "snapshot",
    "context_tokens": 512,
    "corpus_hash": "bbbbbbbbbbbb",
    "recipe_id": "cccccccccccc",
    "code": "dddddddddddd",
}
OBSERVED = {"kv_cache_dtype": "bfloat16", "cache_class": "DynamicCache", "codec": "int"}
CURRENT = {"small": {name: IDENTITY[name] for name in ("model_hash", "corpus_hash", "code")}}


def row(**changes):
    """A row that names the needle eval and shows what its evidence saw."""
    declared = {"mechanism": "kv_quantization", "mechanism_variant": "int", "quality_eval_id": "needle"}
    return checked_row(declared | IDENTITY | OBSERVED | {"bits_per_value": 4.5} | changes)


def needles(lost=0, n=500):
    """What the needle eval measures when the variant loses some of the 90 % that the baseline finds."""
    baseline = (np.arange(n) % 10 > 0).astype(float)
    variant = baseline.copy()
    variant[np.flatnonzero(baseline)[:lost]] = 0
    parts = {"metrics": measured(variant), "baseline": measured(baseline), "paired": paired(variant, baseline)}
    return {part: {"needle_recall": measure.model_dump()} for part, measure in parts.items()}


def content(lost=0, **changes):
    """Everything of evidence but its id, as JSON."""
    identity = IDENTITY | {"versions": {"kvlab": "0.1.0"}}
    counted = {"fires": 96, "expected_fires": 96, "kv_bytes": 4500, "kv_values": 8000, "canary_kl": 2.0}
    return {
        "quality_eval_id": "needle",
        "version": "1",
        **needles(lost),
        "identity": identity,
        "observed": OBSERVED | counted,
        "baseline_recipe_id": BASELINE_RECIPE,
        "baseline_identity": identity | {"recipe_id": BASELINE_RECIPE},
        "evals": [changes.get("quality_eval_id", "needle")],
        "family": {"run": "run", "tested": 1},
    } | changes


def texts(n=100):
    """What the eval of text measures when the variant loses about .002 nats in each window."""
    kl = 0.002 * np.random.default_rng(0).lognormal(0, 0.5, n)
    scores = {"kl": (kl, 0 * kl), "delta_nll": (kl[::-1], 0 * kl), "top1_agreement": (1 - 4 * kl, 1 + 0 * kl)}
    parts = {
        "metrics": lambda variant, _: measured(variant, False),
        "baseline": lambda _, baseline: measured(baseline, False),
        "paired": lambda variant, baseline: paired(variant, baseline, False),
    }
    return {part: {key: make(*found).model_dump() for key, found in scores.items()} for part, make in parts.items()} | {
        "quality_eval_id": "kv_fidelity"
    }


def evidence(lost=0, **changes):
    """A JSON object as a measuring stage writes it."""
    return build(**content(lost, **changes)).model_dump(mode="json")


def codes(found):
    return {reason.code for reason in found}


def test_valid_evidence_completes_the_row():
    derived = status(row(), [evidence()], REGISTRY, CURRENT)
    assert derived.status == "completed" and derived.reasons == ()
    assert [(j.key, j.word) for j in derived.judgements] == [("needle_recall", "within")]


def test_a_file_gives_back_what_was_written(tmp_path):
    whole = build(**content())
    write_json(tmp_path / "e.json", whole.model_dump(mode="json"))
    assert read(tmp_path / "e.json") == whole and problems(whole, row(), REGISTRY, CURRENT) == []


# ------------------------------------------------------------------------------------ every code


def forged(path, value, **changes):
    """Evidence with one thing changed and its id computed anew: only what it says can give it away."""
    parts = copy.deepcopy(content(**changes))
    here = parts
    for step in path[:-1]:
        here = here[step]
    if value is ABSENT:
        del here[path[-1]]
    else:
        here[path[-1]] = value
    return build(**parts).model_dump(mode="json")


def edited(path, value):
    """The same under the id of what was measured."""
    whole = evidence()
    here = whole
    for step in path[:-1]:
        here = here[step]
    here[path[-1]] = value
    return whole


PAGES = {"mechanism_variant": "hadamard_pages", "kv_cache_dtype": "uint8", "codec": "hadamard"}


def paged(**changes):
    """The same codec's evidence where an engine's own pages hold what it writes, with something changed of them."""
    served = {"recipe_id": IDENTITY["recipe_id"], "calibration": content()["identity"].get("calibration")}
    found = {"kv_cache_dtype": "uint8", "codec": "hadamard", "backend": BACKEND, "pool": POOL, "served": served}
    return evidence(observed=content()["observed"] | found | changes)


IMPORTED = {"harness": "lm-evaluation-harness", "plain": "a" * 12, "coded": "b" * 12, "changed": 3}
IMPORTED |= {"differs": {"kv_cache_dtype": ["auto", "fp8"]}, "unobserved": ["codec"]}
ABSENT = object()
RECALL = ("metrics", "needle_recall")
TEXTS = texts()
ENDS = list(TEXTS["paired"]["kl"]["highs"])
TEXT_ROW = {"quality_eval_id": "kv_fidelity"}


def on_text(path, value):
    """The same of evidence on text, whose metrics are means."""
    return forged(path, value, **copy.deepcopy(TEXTS)), TEXT_ROW


PLANTED = [
    ("evidence_missing", None, {}),
    ("evidence_missing", evidence(), {"quality_eval_id": None}),
    ("evidence_malformed", {"quality_eval_id": "needle"}, {}),
    ("evidence_malformed", ["no", "object"], {}),
    ("evidence_malformed", edited(("observed", "fires"), "96"), {}),
    ("evidence_malformed", edited(("observed", "fires"), True), {}),
    ("evidence_malformed", edited(("observed", "fires"), 10**400), {}),
    ("evidence_malformed", edited(("schema_version",), 1), {}),
    ("evidence_malformed", edited(("schema_version",), True), {}),
    ("evidence_not_finite", edited((*RECALL, "value"), float("nan")), {}),
    ("evidence_not_finite", edited(("paired", "needle_recall", "high"), float("-inf")), {}),
    ("evidence_not_finite", edited(("paired", "needle_recall", "lows"), [float("-inf")]), {}),
    ("evidence_tampered", edited((*RECALL, "value"), 0.91), {}),
    ("evidence_tampered", edited(("evidence_id",), "0" * 12), {}),
    ("evidence_unregistered_eval", forged(("quality_eval_id",), "needles"), {}),
    ("evidence_other_eval", evidence(), {"quality_eval_id": "kv_fidelity"}),
    (
        "evidence_unsuited_eval",
        evidence(),
        {
            "mechanism": "compressed_attention",
            "mechanism_variant": "triattention_class",
            "quality_eval_id": "kv_fidelity",
        },
    ),
    ("evidence_other_version", forged(("version",), "2"), {}),
    *(
        (f"evidence_other_{what}", evidence(), {name: other})
        for name, what, other in (
            ("model", "model", "large"),
            ("engine", "engine", "vllm"),
            ("recipe_id", "recipe", "eeeeeeeeeeee"),
            ("context_tokens", "context", 1024),
            ("dtype", "dtype", "float32"),
            ("protocol", "protocol", "in_forward"),
            ("device", "device", "cuda"),
        )
        for other in (other, None)
    ),
    ("evidence_stale_model", evidence(), {"model_hash": "ffffffffffff"}),
    ("evidence_stale_corpus", evidence(), {"corpus_hash": "ffffffffffff"}),
    ("evidence_stale_code", evidence(), {"code": "ffffffffffff"}),
    ("evidence_stale_unknown", forged(("identity", "model"), "large"), {"model": "large"}),
    ("evidence_no_baseline", forged(("baseline_identity",), None), {}),
    ("evidence_no_baseline", forged(("baseline_recipe_id",), ABSENT), {}),
    ("evidence_no_baseline", forged(("baseline",), {}), {}),
    ("evidence_other_baseline", forged(("baseline_recipe_id",), "cccccccccccc"), {}),
    ("evidence_other_baseline", forged(("baseline_identity", "recipe_id"), "cccccccccccc"), {}),
    *(
        (
            "evidence_other_baseline",
            forged(("baseline_identity", name), 1024 if name == "context_tokens" else "other"),
            {},
        )
        for name in IDENTITY
        if name != "recipe_id"
    ),
    ("evidence_other_baseline", forged(("baseline_identity", "versions"), {"kvlab": "0.2.0"}), {}),
    *(
        ("evidence_metric_missing", forged((part,), {"other": needles()[part]["needle_recall"]}), {})
        for part in needles()
    ),
    ("evidence_metric_unknown", forged(("metrics", "other"), needles()["metrics"]["needle_recall"]), {}),
    ("evidence_range", forged((*RECALL, "value"), 3.0), {}),
    ("evidence_range", forged((*RECALL, "value"), -0.1), {}),
    ("evidence_range", *on_text(("metrics", "kl", "value"), -1.0)),
    ("evidence_range", *on_text(("metrics", "top1_agreement", "value"), 1.1)),
    ("evidence_range", *on_text(("paired", "top1_agreement", "value"), -1.1)),
    ("evidence_interval", forged((*RECALL, "low"), 0.89), {}),  # all are of a rate: its counts give another
    ("evidence_interval", forged((*RECALL, "high"), 0.91), {}),
    ("evidence_interval", forged((*RECALL, "se"), 0.001), {}),
    ("evidence_interval", forged((*RECALL, "n"), 1), {}),
    ("evidence_interval", forged(("paired", "needle_recall", "gained"), None), {}),
    ("evidence_interval", forged(("paired", "needle_recall", "lost"), -1.0), {}),
    ("evidence_interval", forged(("paired", "needle_recall", "low"), -0.001), {}),
    ("evidence_interval", *on_text(("metrics", "kl", "low"), 0.1)),
    ("evidence_interval", *on_text(("baseline", "kl", "se"), 0.2)),  # narrower than its scatter
    ("evidence_interval", *on_text(("metrics", "kl", "n"), 1)),
    ("evidence_ends", *on_text(("paired", "kl", "highs"), ENDS[:1])),
    ("evidence_ends", *on_text(("paired", "kl", "highs"), [])),
    ("evidence_ends", *on_text(("paired", "kl", "highs"), [0.0021, *ENDS[1:]])),  # inside the interval
    ("evidence_ends", *on_text(("paired", "kl", "highs"), [*ENDS[:-1], ENDS[0]])),  # narrower again
    ("evidence_ends", *on_text(("paired", "kl", "n"), 16)),  # more than so few windows carry
    ("evidence_unpaired", forged((*RECALL, "n"), 400), {}),
    ("evidence_unpaired", forged(("baseline", "needle_recall", "n"), 400), {}),
    ("evidence_unpaired", *on_text(("paired", "kl", "value"), 0.0021)),
    ("evidence_unpaired", forged(("paired", "needle_recall"), change_of(51, 51, 500).model_dump()), {}),
    ("evidence_other_baseline", *on_text(("baseline", "kl", "value"), 0.46)),
    ("evidence_other_baseline", *on_text(("baseline", "top1_agreement", "value"), 0.9)),
    ("evidence_withheld", evidence(evals=("needle", "kv_fidelity")), {}),
    (
        "evidence_outside_band",
        evidence(
            identity=content()["identity"] | {"context_tokens": 64},
            baseline_identity=content()["baseline_identity"] | {"context_tokens": 64},
        ),
        {"context_tokens": 64},
    ),
    ("evidence_other_calibration", evidence(), {"calibration": "another fit"}),
    ("evidence_canary", forged(("observed", "canary_kl"), CANARY_MIN / 2), {}),
    ("evidence_canary", forged(("observed", "canary_kl"), None), {}),
    ("evidence_imported", forged(("imported",), IMPORTED), {}),
    ("evidence_codec_idle", forged(("observed", "fires"), 0), {}),
    ("evidence_codec_idle", forged(("observed", "fires"), 95), {}),
    ("evidence_codec_idle", evidence(observed=content()["observed"] | {"fires": 0, "expected_fires": 0}), {}),
    ("evidence_codec_idle", forged(("observed", "codec"), None), {"codec": None}),
    ("evidence_codec_idle", forged(("observed", "codec"), "identity"), {"codec": "identity"}),
    ("evidence_codec_idle", forged(("observed", "codec"), ""), {"codec": None, "mechanism_variant": "fp8_e4m3"}),
    ("evidence_other_codec", forged(("observed", "codec"), "kivi"), {"codec": None}),
    ("evidence_other_backend", paged(backend="kvlab.cache.pages.backend.Other"), PAGES),
    ("evidence_other_served", paged(served={"recipe_id": IDENTITY["recipe_id"], "calibration": "other"}), PAGES),
    ("evidence_other_served", paged(served={"recipe_id": "e" * 12, "calibration": None}), PAGES),
    ("evidence_pages", paged(pool=None), PAGES),
    ("evidence_pages", paged(backend=None), PAGES),
    ("evidence_pages", paged(served=None), PAGES),
    ("evidence_pages", evidence(), {"mechanism_variant": "hadamard_pages"}),  # of a codec that ran beside the cache
    ("evidence_other_pattern", forged(("observed", "pattern"), "block_sparse:top_k=4"), {}),
    ("evidence_other_pattern", evidence(), {"pattern": "block_sparse:top_k=4"}),
    ("evidence_contradicts_row", evidence(), {"kv_cache_dtype": "fp8"}),
    ("evidence_contradicts_row", paged(), PAGES | {"capacity_tokens": 4 * 64 * 128}),
    ("evidence_contradicts_row", paged(), PAGES | {"block_bytes": POOL["block_bytes"] // 2}),
    ("evidence_contradicts_row", paged(), PAGES | {"backend": "kvlab.cache.pages.backend.Other"}),
    ("evidence_contradicts_row", evidence(), {"cache_class": "StaticCache"}),
    ("evidence_contradicts_row", evidence(), {"bits_per_value": 3.0}),
]


@pytest.mark.parametrize(("code", "piece", "changes"), PLANTED, ids=[f"{i}-{p[0]}" for i, p in enumerate(PLANTED)])
def test_each_problem_has_its_own_code(code, piece, changes):
    derived = status(row(**changes), None if piece is None else [piece], REGISTRY, CURRENT)
    assert code in codes(derived.reasons) and derived.status == "pending"


TOGETHER = {"evidence_incomplete", "evidence_other_family"}
"""Of several pieces, or of what a mechanism must show: see the tests below and those of the mutations."""


def test_every_code_is_planted():
    assert {code for code, _, _ in PLANTED} == set(reasons.EVIDENCE_REASONS) - TOGETHER


def test_a_mechanism_shows_what_it_must():
    """A KL of nothing says nothing of retrieval, nor the other way round: who may choose chooses the outcome."""
    needle, text = evidence(), evidence(**copy.deepcopy(TEXTS))
    for attached, named in (([needle], "needle"), ([text], "kv_fidelity")):
        alone = status(row(quality_eval_id=named), attached, SHIPPED, CURRENT)
        assert codes(alone.reasons) == {"evidence_incomplete"} and alone.status == "pending"
    both = status(row(), [needle, text], SHIPPED, CURRENT)
    assert both.status == "completed" and both.reasons == ()


def test_beyond_the_contexts_of_an_eval_of_text_retrieval_is_enough():
    far = {"context_tokens": 16384}
    identity, baseline = (content()[name] | far for name in ("identity", "baseline_identity"))
    alone = status(row(**far), [evidence(identity=identity, baseline_identity=baseline)], SHIPPED, CURRENT)
    assert alone.status == "completed" and alone.reasons == ()


@pytest.mark.parametrize("code", sorted(set(reasons.EVIDENCE_REASONS) - {"evidence_stale_unknown"} - TOGETHER))
def test_one_thing_that_is_wrong_is_one_code(code):
    """The first plant of each code; where one change breaks two things, both are said and no others."""
    _, piece, changes = next(planted for planted in PLANTED if planted[0] == code)
    also = {
        "evidence_unregistered_eval": {"evidence_other_eval", "evidence_withheld"},
        "evidence_other_model": {"evidence_stale_model"},
        "evidence_metric_missing": {"evidence_metric_unknown"},  # it is there under another name
        "evidence_range": {"evidence_unpaired"},
        "evidence_unpaired": {"evidence_interval"},  # that of other items
        "evidence_unsuited_eval": {"evidence_other_eval", "evidence_other_codec"},
    }
    found = codes(status(row(**changes), piece and [piece], REGISTRY, CURRENT).reasons)
    assert found - also.get(code, set()) == {code}


@pytest.mark.parametrize("name", ["model_hash", "corpus_hash", "code"])
def test_what_is_current_makes_evidence_stale(name):
    what = {"model_hash": "model", "corpus_hash": "corpus", "code": "code"}[name]
    now = {"small": CURRENT["small"] | {name: "ffffffffffff"}}
    assert codes(problems(evidence(), row(), REGISTRY, now)) == {f"evidence_stale_{what}"}
    assert codes(problems(evidence(), row(**{name: None}), REGISTRY, now)) == {f"evidence_stale_{what}"}
    assert problems(evidence(), row(**{name: None}), REGISTRY, None) == []


def test_a_cache_that_the_engine_stores_in_fewer_bits_needs_no_codec():
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "codec": None}
    piece = evidence(observed=content()["observed"] | fp8 | {"fires": 0, "expected_fires": 0})
    assert problems(piece, row(mechanism_variant="fp8_e4m3", **fp8), REGISTRY, CURRENT) == []


def test_pages_rest_on_what_the_engine_says_of_them():
    assert problems(paged(), row(**PAGES), REGISTRY, CURRENT) == []
    told = POOL | {"backend": BACKEND, "capacity_tokens": 64 * 128}
    assert problems(paged(), row(**PAGES | told), REGISTRY, CURRENT) == []


def test_reasons_are_one_line_and_name_what_was_found():
    (reason,) = problems(evidence(), row(engine="vllm"), REGISTRY, CURRENT)
    assert str(reason) == "evidence_other_engine: engine is 'vllm' in the row and 'hf' in the evidence"
    (reason,) = problems(forged(("quality_eval_id",), "needles"), row(), REGISTRY, CURRENT)
    assert str(reason).endswith("did you mean 'needle'?")


# ------------------------------------------------------------------------------------- any edit


def leaves(node, path=()):
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


VALID = evidence()
LEAVES = list(leaves(VALID))
ANY = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers(), max_size=2)
)


@examples(400)
@given(st.data(), st.sampled_from(LEAVES))
def test_any_edit_of_a_leaf_is_found(data, path):
    whole = copy.deepcopy(VALID)
    here = whole
    for step in path[:-1]:
        here = here[step]
    old = here[path[-1]]
    near = [math.nextafter(old, math.inf), old * (1 + 1e-12), -old] if isinstance(old, float) else [old]
    here[path[-1]] = data.draw(st.one_of(ANY, st.sampled_from(near)))
    assume(json.dumps(here[path[-1]]) != json.dumps(old) and not _same_number(here[path[-1]], old))
    found = codes(problems(whole, row(), REGISTRY, CURRENT))
    assert found & {"evidence_tampered", "evidence_malformed", "evidence_not_finite"}
    assert status(row(), [whole], REGISTRY, CURRENT).status == "pending"


def _same_number(a, b):
    """An int in a float's place, as some JSON writers put it."""
    return type(a) in (int, float) and type(b) is float and a == b


@examples(100)
@given(ANY | st.dictionaries(st.text(max_size=5), ANY, max_size=3))
@example({**VALID, "remark": "trust me"})
@example({key: value for key, value in VALID.items() if key != "paired"})
def test_what_is_no_evidence_never_completes(piece):
    assert status(row(), [piece], REGISTRY, CURRENT).status == "pending"


# ---------------------------------------------------------------------------------- the status


def fidelity(loss=0.0):
    """Evidence of the eval whose baseline scores itself exactly."""
    rng = np.random.default_rng(3)
    kl = loss + 1e-4 * rng.random(64)
    scores = {"kl": (kl, 0 * kl), "delta_nll": (kl, 0 * kl), "top1_agreement": (1 - 0.001 * rng.random(64), 1 + 0 * kl)}
    parts = {
        "metrics": {key: measured(variant) for key, (variant, _) in scores.items()},
        "baseline": {key: measured(baseline) for key, (_, baseline) in scores.items()},
        "paired": {key: paired(variant, baseline) for key, (variant, baseline) in scores.items()},
    }
    dumped = {part: {key: m.model_dump() for key, m in found.items()} for part, found in parts.items()}
    return evidence(quality_eval_id="kv_fidelity", **dumped)


def derived(pieces, **changes):
    return status(row(**changes), pieces, REGISTRY, CURRENT)


def test_a_loss_beyond_its_margin_is_a_failed_eval():
    found = derived([evidence(lost=100)])
    assert (found.status, found.reasons, found.judgements[0].word) == ("failed", (), "beyond")


def test_an_open_word_is_pending():
    found = derived([evidence(lost=20)])
    assert (found.status, found.reasons, found.judgements[0].word) == ("pending", (), "open")
    assert found.judgements[0].needed_n > 500


def test_a_typed_status_changes_nothing():
    assert derived([], quality_eval_status="completed").status == "pending"
    assert derived([evidence(lost=100)], quality_eval_status="completed").status == "failed"


def test_a_baseline_without_noise():
    assert derived([fidelity()], quality_eval_id="kv_fidelity").status == "completed"
    assert derived([fidelity(0.5)], quality_eval_id="kv_fidelity").status == "failed"


def test_a_bad_result_is_not_hidden_behind_a_good_one():
    for pieces in ([evidence(), fidelity(0.5)], [fidelity(0.5), evidence()]):
        assert derived(pieces).status == "failed"
    assert derived([evidence(), fidelity()]).status == "completed"
    assert derived([evidence(), edited((*RECALL, "value"), 0.95)]).status == "pending"
    assert derived([evidence(lost=100), edited((*RECALL, "value"), 0.95)]).status == "failed"


def test_lossless_mechanisms_need_no_evidence():
    plain = {"mechanism": "baseline", "mechanism_variant": None, "codec": None, "quality_eval_id": None}
    assert derived(None, **plain) == ("not_required", (), ())
    both = plain | {"mechanism": "baseline+speculative_decoding", "mechanism_variant": "none+eagle3"}
    assert derived([], **both).status == "not_required"
    assert derived([], **both | {"mechanism_variant": "none+medusa"}).status == "pending"
    assert derived([], **both | {"mechanism_variant": "eagle3"}).status == "pending"
    assert derived([], **both | {"mechanism": None}).status == "pending"


def test_a_lossless_mechanism_that_was_seen_to_lose_has_failed():
    plain = {"mechanism": "baseline", "mechanism_variant": None, "codec": None}
    observed = content()["observed"] | {"codec": None, "fires": 0, "expected_fires": 0}
    assert derived([evidence(lost=100, observed=observed)], **plain).status == "failed"
    assert derived([evidence(observed=observed)], **plain).status == "not_required"


@pytest.mark.parametrize(("hits", "n"), [(0, 2), (2, 2), (1, 3), (0, 500), (500, 500), (250, 500), (499, 500)])
def test_no_interval_of_ours_is_taken_for_too_narrow(hits, n):
    scores = (np.arange(n) < hits).astype(float)
    for pair in ((scores, scores), (scores, scores[::-1]), (scores, 0 * scores), (scores, 0 * scores + 1)):
        parts = {"metrics": measured(pair[0]), "baseline": measured(pair[1]), "paired": paired(*pair)}
        piece = evidence(**{part: {"needle_recall": measure.model_dump()} for part, measure in parts.items()})
        assert problems(piece, row(), REGISTRY, CURRENT) == []


def test_one_piece_needs_no_list():
    assert derived(evidence()).status == derived(parse(evidence())).status == "completed"


# ----------------------------------------------------------------------------- making and reading


def test_nothing_that_is_not_finite_is_made():
    parts = needles()
    parts["paired"]["needle_recall"]["low"] = float("nan")
    with refused(NonFinite, "non-finite.evidence", "needle"):
        build(**content(**parts))


def test_a_wrong_object_is_one_line():
    with refused_in_one_line(EvidenceError, "evidence.fields", "remark") as caught:
        parse({"remark": 1, "observed": 3})
    assert re.search(r"and \d+ more$", str(caught.value))
    with refused(EvidenceError, "evidence.fields", "metrix", "'metrics'"):
        parse(VALID | {"metrix": {}})
    with refused(EvidenceError, "evidence.fields", "the whole is 3"):
        parse(3)


def test_unreadable_files_are_named(tmp_path):
    with refused(StorageError, None, tmp_path / "none.json"):
        read(tmp_path / "none.json")
    for text in ("{", '{"a": 1, "a": 2}', '{"a": NaN}'):
        (tmp_path / "e.json").write_text(text)
        with refused(RowError, None, tmp_path / "e.json"):
            read(tmp_path / "e.json")
    (tmp_path / "e.json").write_text("{}")
    with refused(EvidenceError, "evidence.fields", tmp_path / "e.json", "quality_eval_id is missing"):
        read(tmp_path / "e.json")


def test_an_engine_s_own_cache_must_move_the_logits_by_itself():
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "codec": None}
    shown = {"mechanism_variant": "fp8_e4m3", "codec": None, "kv_cache_dtype": "fp8_e4m3"}
    for moved, expected in ((1e-9, set()), (None, set()), (0.0, {"evidence_canary"}), (-1.0, {"evidence_canary"})):
        observed = content()["observed"] | fp8 | {"fires": 0, "expected_fires": 0, "canary_kl": moved}
        assert codes(problems(evidence(observed=observed), row(**shown), REGISTRY)) == expected


def test_another_harness_need_not_say_that_it_looked():
    entry = REGISTRY.evals["needle"].model_copy(update={"harness": "lm-evaluation-harness"})
    other = Registry(REGISTRY.mechanisms, REGISTRY.evals | {"needle": entry})
    piece = forged(("observed", "canary_kl"), None)
    assert codes(problems(piece, row(), other)) == set()
    assert codes(problems(forged(("observed", "canary_kl"), 0.0), row(), other)) == {"evidence_canary"}


def test_windows_of_one_document_are_resampled_together():
    change = np.repeat(np.random.default_rng(5).normal(size=12), 2)  # both windows of a document lose alike
    zeros, pairs = np.zeros(24), [number // 2 for number in range(24)]
    apart, together = (paired(change, zeros, False, documents=documents) for documents in (None, pairs))
    assert together.value == pytest.approx(apart.value) and together.n == apart.n == 24
    assert together.se == pytest.approx(change.std() / 11**0.5)
    assert together.high - together.low > 1.3 * (apart.high - apart.low)
    assert paired(change, zeros, False, documents=range(24)) == apart
