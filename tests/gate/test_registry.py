import copy
import json
import math

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvlab.advice.serving_engines import SERVING
from kvlab.codecs.catalogue import KEPT_WHOLE, LADDERED, UNSTORED
from kvlab.core.recipe import CODECS
from kvlab.gate.catalogue.columns import MECHANISMS
from kvlab.gate.evidence.measures import measured, paired
from kvlab.gate.evidence.quality import judge
from kvlab.gate.reasons import REGISTRY_REASONS
from kvlab.gate.registry import SHIPPED, Registry, RegistryError, load, parse, problems
from kvlab.text import needles
from refusals import refused_in_one_line
from tiers import examples

PUBLISHED_PAIRS = {
    ("baseline", "none"): (None, None),
    ("kv_quantization", "fp8_e4m3"): ("fp8_e4m3", "kv_cache"),
    ("kv_quantization", "turboquant_class"): ("turboquant_class", "kv_cache"),
    ("kv_compression", "kvtc_class"): ("kvtc_class", "kv_cache"),
    ("compressed_attention", "triattention_class"): ("triattention_class", "attention"),
    ("speculative_decoding", "mtp"): (None, None),
    ("speculative_decoding", "eagle3"): (None, None),
    ("speculative_decoding", "medusa"): (None, None),
    ("speculative_decoding", "dflash"): (None, None),
}
PUBLISHED_TASKS = {
    "ruler_v1": "ruler",
    "longbench_v2": "longbench2",
    "humaneval": "humaneval",
    "math_500": "minerva_math500",
}
EMPTY = ({}, {})


def shipped(name):
    return yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())


MECHANISM_DATA, EVAL_DATA = shipped("mechanisms"), shipped("evals")


def files():
    """Both shipped files' contents, free to be spoilt."""
    return copy.deepcopy(MECHANISM_DATA), copy.deepcopy(EVAL_DATA)


def variant(mechanisms, name):
    return next(entry for entry in mechanisms["mechanisms"] if entry["variant"] == name)


def an_eval(evals, name):
    return next(entry for entry in evals["evals"] if entry["quality_eval_id"] == name)


# ------------------------------------------------------------------------------- what is shipped


def test_the_published_pairs_keep_their_names_and_are_what_rows_call_them():
    known = load().mechanisms
    assert {pair: (known[pair].method, known[pair].scope) for pair in PUBLISHED_PAIRS} == PUBLISHED_PAIRS
    assert all(known[pair].umbrella == pair[1].endswith("_class") for pair in PUBLISHED_PAIRS)


def test_the_published_evals_keep_their_ids_and_name_a_task_of_the_harness():
    known = load().evals
    assert {name: known[name].task for name in PUBLISHED_TASKS} == PUBLISHED_TASKS
    assert {known[name].harness for name in PUBLISHED_TASKS} == {"lm-evaluation-harness"}


def test_longbench_v2_is_accuracy_and_scored_without_decoding():
    entry = load().eval("longbench_v2")
    assert [metric.key for metric in entry.metrics] == ["longbench_accuracy"]
    assert not entry.generates


def test_every_codec_of_the_ladder_is_registered_once_under_its_own_name():
    own = [entry for entry in load().mechanisms.values() if entry.variant in CODECS]
    of_engines = {one.recipe.v.codec for engine in SERVING.values() for one in engine.formats}
    assert sorted(entry.variant for entry in own) == sorted({*LADDERED, *KEPT_WHOLE, *of_engines})
    assert all(entry.codecs == (entry.variant,) and not entry.lossless and not entry.umbrella for entry in own)


EXACT = ("mtp", "eagle3", "dflash", "self_coded_cache", "hydra")  # variants whose check keeps the model's law


def test_only_the_baseline_and_exact_speculation_are_lossless():
    lossless = {entry.name for entry in load().mechanisms.values() if entry.lossless}
    assert lossless == {"baseline/none", *(f"speculative_decoding/{name}" for name in EXACT)}


def test_doubtful_citations_of_the_older_registry_are_gone():
    known = load()
    cited = {entry.name: entry.sources for entry in known.mechanisms.values()}
    assert all("arXiv:2401.18079" not in sources for sources in cited.values())  # KVQuant rotates nothing
    assert cited["speculative_decoding/eagle3"] == ("arXiv:2503.01840",)
    assert known.eval("math_500").sources == ("arXiv:2103.03874", "arXiv:2305.20050")


def test_every_metric_has_a_fixed_margin_in_its_unit_and_says_why():
    from kvlab.core.params import VerdictSection

    metrics = [metric for entry in load().evals.values() for metric in entry.metrics]
    assert all(metric.margin > 0 and len(metric.unit) > 5 and len(metric.why) > 20 for metric in metrics)
    margins = {metric.key: metric.margin for metric in metrics}
    assert margins["delta_nll"] == VerdictSection().accept_ppl == margins["kl"]  # as the reasons say
    assert margins["top1_agreement"] == pytest.approx(1 - VerdictSection().accept_top1)


def test_every_rate_has_a_floor_above_its_margin_so_that_there_is_something_to_lose():
    floors = {metric.key: metric.floor for entry in load().evals.values() for metric in entry.metrics}
    assert {key for key, floor in floors.items() if floor is None} == {
        "kl",
        "delta_nll",
        "top1_agreement",
        "greedy_prefix",
        "greedy_same",
    }
    rated = [metric for entry in load().evals.values() for metric in entry.metrics if metric.floor is not None]
    assert all(metric.floor > metric.margin for metric in rated)


# Items, how many the baseline gets right, how many may change each way (None: as many as can), and be lost with none
# gained.
SIZES = {
    "ruler_v1": (6500, 5850, None, 107),
    "longbench_v2": (503, 176, 10, 3),
    "humaneval": (164, 82, 1, 0),
    "math_500": (500, 250, 10, 3),
    "needle": (200, 180, 10, 3),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_variant_can_be_within_at_the_size_that_the_eval_has(name):
    items, right, exchanged, lost = SIZES[name]
    (metric,) = load().eval(name).metrics
    for least in (0, 1):
        word = ("within", "open")[least]
        if exchanged is not None:
            assert word_of(metric, items, right, exchanged + least, exchanged + least) == word
        assert word_of(metric, items, right, lost + least, 0) == word


def word_of(metric, items, right, lost, gained):
    baseline = np.arange(items) < right
    variant = baseline.copy()
    variant[:lost], variant[items - gained :] = False, True
    return judge(metric, paired(variant, baseline), measured(variant)).word


def test_baseline_and_speculation_never_store_what_loses():
    entries = [entry for entry in load().mechanisms.values() if entry.kind != "compression"]
    assert {entry.kv_cache_dtypes for entry in entries} == {("float32", "bfloat16", "float16")}


# -------------------------------------------------------------------------------------- look-ups


def test_no_variant_is_the_variant_none():
    known = load()
    assert known.mechanism("baseline", None) is known.mechanism("baseline", "") is known.mechanism("baseline", "none")
    assert known.mechanism("kv_quantization", None) is None


@pytest.mark.parametrize("given", [("Baseline", "none"), ("kv_quantization", "fp8_e4m3 "), ("kv_quantization", "e5")])
def test_an_unregistered_pair_is_none_and_no_error(given):
    assert load().mechanism(*given) is None


def test_an_eval_speaks_for_its_band_with_both_ends():
    entry = load().eval("longbench_v2")
    assert [entry.covers(tokens) for tokens in (8191, 8192, 131072, 131073)] == [False, True, True, False]
    assert load().eval(None) is None


def test_a_mean_over_tokens_carries_no_claim_of_eviction():
    known = load()
    evicting, coded = (
        known.mechanism("compressed_attention", "triattention_class"),
        known.mechanism("kv_quantization", "d4"),
    )
    assert not known.carries("kv_fidelity", evicting)
    assert known.carries("needle", evicting) and known.carries("kv_fidelity", coded)
    assert not known.carries("mmlu", coded)


def test_tables_to_print_are_flat_and_complete():
    known = load()
    tables = known.describe()
    assert [row["variant"] for row in tables["mechanisms"]] == [pair[1] for pair in known.mechanisms]
    assert [row["quality_eval_id"] for row in tables["evals"]] == list(known.evals)
    assert len(tables["metrics"]) == sum(len(entry.metrics) for entry in known.evals.values())
    for rows in tables.values():
        assert len({tuple(row) for row in rows}) == 1
        assert all(cell is None or isinstance(cell, str | int | float) for row in rows for cell in row.values())


# ---------------------------------------------------------------------------------- empty or none


def test_nothing_given_is_the_shipped_registry():
    assert load(None, None) == load() == parse(*files())


def test_an_empty_registry_stays_empty(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("{}\n")
    nothing = load(path, path)
    assert nothing == Registry({}, {}) == parse(*EMPTY)
    assert nothing.mechanism("baseline", "none") is None and nothing.eval("ruler_v1") is None
    assert load(mechanisms=path).evals == load().evals
    assert load(evals=path).mechanisms == load().mechanisms


def test_an_empty_list_is_an_empty_registry():
    assert parse({"schema_version": 3, "mechanisms": []}, {"schema_version": 3, "evals": []}) == Registry({}, {})


# ---------------------------------------------------------------------------------------- digest


@examples(15)
@given(st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_order(random):
    mechanisms, evals = files()
    random.shuffle(mechanisms["mechanisms"])
    random.shuffle(evals["evals"])
    assert parse(mechanisms, evals).digest == load().digest


def test_the_digest_depends_on_every_threshold():
    seen = {load().digest}
    for e, entry in enumerate(EVAL_DATA["evals"]):
        for m in range(len(entry["metrics"])):
            for field in ("margin", "floor"):
                mechanisms, evals = files()
                evals["evals"][e]["metrics"][m][field] = 0.123
                seen.add(parse(mechanisms, evals).digest)
    assert len(seen) == 1 + 2 * sum(len(entry["metrics"]) for entry in EVAL_DATA["evals"])


# ------------------------------------------------------------------- everything that can be wrong


def put(where, name, **changes):
    """Change an entry; `where` is 0 for a mechanism, 1 for an eval."""

    def change(data):
        (variant, an_eval)[where](data[where], name).update(changes)

    return change


def metric(name, **changes):
    def change(data):
        an_eval(data[1], name)["metrics"][0].update(changes)

    return change


def twice(where, kind):
    def change(data):
        data[where][kind].append(copy.deepcopy(data[where][kind][1]))

    return change


def drop(where, kind, keep):
    def change(data):
        data[where][kind] = [entry for entry in data[where][kind] if keep(entry)]

    return change


def without(where, name, key):
    def change(data):
        del (variant, an_eval)[where](data[where], name)[key]

    return change


def replace(where, content):
    def change(data):
        data[where] = content

    return change


def doubled_metric(data):
    metrics = an_eval(data[1], "needle")["metrics"]
    metrics.append(dict(metrics[0]))


FURTHER = f"mechanisms[{len(load().mechanisms)}]"
PLANTED = {
    "list instead of a mapping": ("registry_shape", "mechanisms", replace(0, [])),
    "an empty file is no empty registry": ("registry_shape", "evals", replace(1, None)),
    "entries as a mapping": ("registry_shape", "evals", lambda data: data[1].update(evals={"ruler_v1": {}})),
    "entry that is a word": (
        "registry_shape",
        FURTHER,
        lambda data: data[0]["mechanisms"].append("fp8"),
    ),
    "other schema": ("registry_version", "schema_version", lambda data: data[0].update(schema_version=1)),
    "schema as text": ("registry_version", "schema_version", lambda data: data[1].update(schema_version="3")),
    "key of the file": ("unknown_registry_key", "evls", lambda data: data[1].update(evls=[])),
    "key of a mechanism": ("unknown_registry_key", "codec", put(0, "kivi", codec="kivi")),
    "key of an eval": ("unknown_registry_key", "metric_keys", put(1, "needle", metric_keys=[])),
    "key of a metric": ("unknown_registry_key", "metrics.0.tolerance", metric("needle", tolerance=0.1)),
    "no lossless": ("missing_registry_key", "lossless", without(0, "kivi", "lossless")),
    "no band": ("missing_registry_key", "band", without(1, "needle", "band")),
    "lossless as a word": ("bad_registry_value", "lossless", put(0, "kivi", lossless="yes")),
    "kind not known": ("bad_registry_value", "kind", put(0, "kivi", kind="quantization")),
    "name in capitals": ("bad_registry_value", "variant", put(0, "kivi", variant="KIVI")),
    "name with a plus": ("bad_registry_value", "variant", put(0, "kivi", variant="kivi+mtp")),
    "version as a number": ("bad_registry_value", "version", put(1, "needle", version=1)),
    "no words": ("bad_registry_value", "description", put(1, "needle", description=" ")),
    "pair twice": ("duplicate_mechanism", "variant", twice(0, "mechanisms")),
    "eval twice": ("duplicate_eval", "quality_eval_id", twice(1, "evals")),
    "no baseline": ("no_baseline_entry", "mechanisms", drop(0, "mechanisms", lambda e: e["variant"] != "none")),
    "no such mechanism": ("unknown_mechanism", "mechanism", put(0, "kivi", mechanism="kv_quantisation")),
    "baseline with a variant": ("kind_conflict", "variant", put(0, "none", variant="plain")),
    "quantisation as baseline": ("kind_conflict", "kind", put(0, "kivi", kind="baseline")),
    "speculation that compresses": ("kind_conflict", "kind", put(0, "mtp", kind="compression")),
    "method of the baseline": ("method_scope_conflict", "method", put(0, "none", method="none")),
    "compression without a method": ("method_scope_conflict", "method", put(0, "kivi", method=None)),
    "cache codec on attention": ("method_scope_conflict", "scope", put(0, "kivi", scope="attention")),
    "umbrella unmarked": ("umbrella_conflict", "umbrella", put(0, "kvtc_class", umbrella=False)),
    "umbrella by mistake": ("umbrella_conflict", "umbrella", put(0, "kivi", umbrella=True)),
    "speculation without a draft": ("draft_conflict", "needs_draft", put(0, "eagle3", needs_draft=False)),
    "draft without speculation": ("draft_conflict", "needs_draft", put(0, "kivi", needs_draft=True)),
    "no such codec": ("unknown_codec", "codecs", put(0, "kivi", codecs=["kivvi"])),
    "a control as codec": ("unknown_codec", "codecs", put(0, "kivi", codecs=["noise"])),
    "no such dtype": ("unknown_kv_cache_dtype", "kv_cache_dtypes", put(0, "kivi", kv_cache_dtypes=["bf16"])),
    "a request as dtype": ("unknown_kv_cache_dtype", "kv_cache_dtypes", put(0, "none", kv_cache_dtypes=["auto"])),
    "no dtype": ("unknown_kv_cache_dtype", "kv_cache_dtypes", put(0, "kivi", kv_cache_dtypes=[])),
    "lossless codec that loses": ("lossless_conflict", "lossless", put(0, "kivi", lossless=True)),
    "lossless cache that loses": ("lossless_conflict", "lossless", put(0, "fp8_e4m3", lossless=True)),
    "lossless pattern": ("lossless_pattern", "lossless", put(0, "eviction", lossless=True)),
    "baseline that loses": ("lossless_conflict", "lossless", put(0, "none", lossless=False)),
    "eval removed": ("dangling_eval", "evals", drop(1, "evals", lambda e: e["quality_eval_id"] != "needle")),
    "eval misspelt": ("dangling_eval", "evals", put(0, "kivi", evals=["ruler_v2"])),
    "scope misspelt": ("dangling_eval", "must_show", put(0, "kivi", must_show=["retreival"])),
    "lossy and shows nothing": ("shows_nothing", "must_show", put(0, "kivi", must_show=[])),
    "floor of a rate above 1": ("bad_range", "metrics", metric("needle", floor=1.5)),
    "rate with ends of its own": ("bad_range", "metrics", metric("needle", lowest=0, highest=1)),
    "baseline outside": ("bad_range", "metrics", metric("kv_fidelity", untouched=-1)),
    "range backwards": ("bad_range", "metrics", metric("kv_fidelity", lowest=1, highest=0, untouched=None)),
    "source of a mechanism": ("bad_source", "sources", put(0, "kivi", sources=["2402.02750"])),
    "source of an eval": ("bad_source", "sources", put(1, "needle", sources=["http://example.org"])),
    "no metric": ("eval_without_metrics", "metrics", put(1, "needle", metrics=[])),
    "metric twice": ("metric_duplicate", "metrics", doubled_metric),
    "direction up": ("bad_direction", "metrics.0.direction", metric("needle", direction="up")),
    "no margin": ("bad_margin", "metrics.0.margin", metric("needle", margin=0)),
    "margin below 0": ("bad_margin", "metrics.0.margin", metric("needle", margin=-2.0)),
    "margin not finite": ("bad_margin", "metrics.0.margin", metric("needle", margin=math.inf)),
    "margin no number": ("bad_margin", "metrics.0.margin", metric("needle", margin=math.nan)),
    "margin true": ("bad_margin", "metrics.0.margin", metric("needle", margin=True)),
    "margin left open": ("bad_margin", "metrics.0.margin", metric("needle", margin=None)),
    "margin without a reason": ("bad_registry_value", "metrics.0.why", metric("needle", why=" ")),
    "margin without a unit": ("bad_registry_value", "metrics.0.unit", metric("needle", unit="")),
    "floor as text": ("bad_margin", "metrics.0.floor", metric("needle", floor="0.2")),
    "band backwards": ("bad_band", "band", put(1, "needle", band=[4096, 128])),
    "band from 0": ("bad_band", "band.0", put(1, "needle", band=[0, 128])),
    "band of one": ("bad_band", "band.1", put(1, "needle", band=[1])),
    "band of three": ("bad_band", "band", put(1, "needle", band=[1, 2, 3])),
    "band not whole": ("bad_band", "band.1", put(1, "needle", band=[1, 2.5])),
    "harness without a task": ("task_conflict", "task", put(1, "ruler_v1", task=None)),
    "own eval with a task": ("task_conflict", "task", put(1, "needle", task="niah_single_1")),
    "nothing decides": ("baseline_conflict", "baseline_required", put(1, "kv_fidelity", baseline_required=False)),
}


@pytest.mark.parametrize(("code", "field", "spoil"), PLANTED.values(), ids=PLANTED)
def test_what_is_planted_is_found_under_its_own_code(code, field, spoil):
    data = list(files())
    spoil(data)
    found = problems(*data)
    assert (code, True) in {(reason.code, reason.field.endswith(field)) for reason in found}
    with pytest.raises(RegistryError) as caught:
        parse(*data)
    assert list(caught.value.reasons) == found


def test_every_code_is_planted():
    assert {code for code, _, _ in PLANTED.values()} | {"registry_unreadable"} == set(REGISTRY_REASONS)  # it: below


def test_the_shipped_files_have_no_problem():
    assert problems(*files()) == []


def test_all_problems_of_both_files_are_said_at_once():
    data = list(files())
    names = ["direction up", "lossless as a word", "pair twice", "harness without a task", "other schema"]
    for name in names:
        PLANTED[name][2](data)
    put(0, "d4", codecs=["d5"], evals=["ruler_v2"])(data)
    expected = {PLANTED[name][0] for name in names} | {"unknown_codec", "dangling_eval"}
    assert {reason.code for reason in problems(*data)} == expected and len(expected) > 6


def test_several_problems_of_one_entry_are_said_at_once():
    data = list(files())
    put(0, "kivi", codecs=["nope"], kv_cache_dtypes=["nope"], scope="attention", lossless=True)(data)
    codes = [reason.code for reason in problems(*data)]
    assert codes == ["method_scope_conflict", "unknown_codec", "unknown_kv_cache_dtype"]
    metric("needle", direction="up", margin=-1)(data)
    assert {reason.code for reason in problems(*data)} >= {"bad_direction", "bad_margin"}


def test_a_slip_names_what_was_probably_meant_and_where():
    data = list(files())
    put(0, "kivi", codec=["kivi"])(data)
    put(0, "d4", codecs=["D4"])(data)
    slip, codec = problems(*data)
    assert slip.field == f"mechanisms[{data[0]['mechanisms'].index(variant(data[0], 'kivi'))}].codec"
    assert "did you mean 'codecs'?" in slip.said and "'D4'" in str(codec.said)


def test_a_refusal_is_one_line_for_a_person():
    with refused_in_one_line(RegistryError, None, "no_baseline_entry") as caught:
        parse({"schema_version": 2, "mechanisms": [variant(files()[0], "kivi")]}, {})
    assert caught.value.exit_code == 2


def test_no_control_of_a_measurement_may_be_called_a_codec():
    assert {codec for entry in load().mechanisms.values() for codec in entry.codecs}.isdisjoint(UNSTORED)


def test_a_baseline_is_not_needed_where_floors_decide():
    data = list(files())
    put(1, "needle", baseline_required=False)(data)
    assert problems(*data) == []


@given(
    where=st.sampled_from(["mechanisms", "evals"]),
    number=st.integers(0, 5),
    key=st.sampled_from(["mechanism", "variant", "quality_eval_id", "metrics", "band", "codecs", "sources", "kind"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
        max_leaves=5,
    ),
)
def test_any_value_anywhere_is_read_or_refused_with_reasons_and_never_crashes(where, number, key, value):
    mechanisms, evals = files()
    {"mechanisms": mechanisms, "evals": evals}[where][where][number][key] = value
    found = problems(mechanisms, evals)
    if not found:
        assert isinstance(parse(mechanisms, evals), Registry)


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("content", [b"evals: [", b"\xff\xfe\x00", b"a: 2024-13-45\n", b"? {a: 1}\n: 1\n"])
def test_a_file_that_is_no_yaml_is_refused_by_its_name(tmp_path, content):
    path = tmp_path / "evals.yaml"
    path.write_bytes(content)
    with pytest.raises(RegistryError) as caught:
        load(evals=path)
    assert [reason.code for reason in caught.value.reasons] == ["file_not_yaml"]
    assert "evals.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_both_files_that_are_missing_are_named(tmp_path):
    with pytest.raises(RegistryError) as caught:
        load(tmp_path / "a.yaml", tmp_path / "b.yaml")
    found = [(reason.code, reason.field) for reason in caught.value.reasons]
    assert found == [("registry_unreadable", "a.yaml"), ("registry_unreadable", "b.yaml")]


def test_a_key_given_twice_is_refused_not_overwritten(tmp_path):
    path = tmp_path / "mechanisms.yaml"
    text = (SHIPPED / "mechanisms.yaml").read_text()
    path.write_text(text.replace("    lossless: false\n", "    lossless: true\n    lossless: false\n", 1))
    with pytest.raises(RegistryError) as caught:
        load(mechanisms=path)
    (reason,) = caught.value.reasons
    assert reason.code == "field_twice" and "lossless" in str(reason)


def test_an_own_entry_is_all_that_a_new_method_takes(tmp_path):
    mechanisms, _ = files()
    mechanisms["mechanisms"].append(variant(mechanisms, "kivi") | {"variant": "kivi2", "method": "kivi2"})
    path = tmp_path / "mechanisms.yaml"
    path.write_text(json.dumps(mechanisms))  # which is YAML; PyYAML would write aliases, which are refused
    assert load(mechanisms=path).mechanism("kv_quantization", "kivi2").method == "kivi2"


def test_every_mechanism_that_a_row_may_name_is_registered():
    assert {entry.mechanism for entry in load().mechanisms.values()} == set(MECHANISMS)


def test_the_needles_floor_is_four_caps_above_what_copying_any_value_finds():
    (metric,) = load().evals["needle"].metrics
    copied_at_random = 1 / (1 + needles.DISTRACTORS)
    assert metric.floor == pytest.approx(copied_at_random + 4 * metric.margin)
