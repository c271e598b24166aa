"""What the gate judges, measured on the tiny model: on transformers, and on vLLM with its own cache in fp8."""

from __future__ import annotations

import polars as pl
import pytest
import torch
from pydantic import ValidationError

from kvlab.codecs.fp8 import Fp8Stream
from kvlab.codecs.hadamard import HadamardStream
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import (
    CapabilityError,
    CodecNotActive,
    CorpusError,
    Fault,
    NonFinite,
    StorageError,
    WitnessDisagrees,
)
from kvlab.core.model import resolve
from kvlab.core.recipe import IDENTITY, Recipe
from kvlab.core.records import CANARY_MIN
from kvlab.engines import registry
from kvlab.engines.registry import start as real_start
from kvlab.measure import engines as lab_engines
from kvlab.measure.scoring import WindowRun
from kvlab.measure.windows import Window
from kvlab.stats.divergences import ReferenceLogits
from kvlab.text import ruler
from kvlab.text.needles import Needle, Needles
from kvlab_pipeline.jobs.measure import Lab
from kvlab_pipeline.studies.mechanisms import cached, items, plan, records, subjects
from kvlab_pipeline.studies.mechanisms import measure as measuring
from kvlab_pipeline.studies.mechanisms.params import Mechanisms
from refusals import refused

pytestmark = pytest.mark.nightly  # rows of the gate are measured again
AVX512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="vLLM reads an fp8 cache with AVX-512 only"
)


@pytest.fixture(scope="session")
def tiny_needles(tiny_params, tmp_path_factory):
    from kvlab.text.needles import build

    out = tmp_path_factory.mktemp("needles") / "needles.parquet"
    build(tiny_params, out)
    ruler.build(tiny_params, out.with_name("ruler.parquet"))  # of no length: the model has too few positions
    return out


@pytest.fixture(scope="session")
def measured(tiny_params, tiny_windows, tiny_needles, tiny_fitted, tmp_path_factory, engine_of, request):
    """engine -> its record and table, measured once."""
    from functools import cache

    @cache
    def run(engine: str):
        out = tmp_path_factory.mktemp("mechanisms") / f"{engine}.parquet"
        request.getfixturevalue(f"{engine}_engine")  # its own start is not the patched one
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "start", engine_of)
            measuring.mechanisms(tiny_params, engine, tiny_windows, tiny_needles, {"hf": tiny_fitted}, "code", out)
        return records.read_mechanisms(out)

    return run


@pytest.fixture(scope="session")
def engine_of(request):
    """`start`, which hands out the session's own engines where it may."""

    kept = []  # to the end of the session, as the engines that are lent

    def start(name, info, dtype, attention=None, *, max_tokens, cache_dtype="auto"):
        if cache_dtype != "auto":
            kept.append(real_start(name, info, dtype, attention, max_tokens=max_tokens, cache_dtype=cache_dtype))
            return Lent(kept[-1])
        return Lent(request.getfixturevalue(f"{name}_engine"))

    return start


class Lent:
    """An engine that is not closed by who borrows it: with it, vLLM gives up what all engines of a process share."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def close(self):
        pass


def scores(table: pl.DataFrame, label: str, metric: str) -> list[float]:
    return table.filter(pl.col("label") == label, pl.col("metric") == metric)["variant"].to_list()


def row(record, label: str):
    (found,) = (row for row in record.rows if row.label == label)
    return found


def test_the_plan_names_what_each_engine_can_run(tiny_params):
    labels = {engine: [v.label for v in plan.variants(tiny_params, engine)] for engine in ("hf", "vllm")}
    inside, finished = (
        [f"{codec} {when}" for codec in ("klt 2", "int 2", "fp8")] for when in ("in_forward", "snapshot")
    )
    assert labels["hf"] == ["baseline", *inside, *finished, "archive 2 snapshot"]
    assert labels["vllm"] == ["baseline", *inside, "fp8_e4m3", "fp8_e5m2"]  # a finished cache is the first engine's
    for engine in labels:
        known = plan.protocols(tiny_params, engine)
        ids = [(v.recipe_id, v.protocol(known)) for v in plan.variants(tiny_params, engine)]
        assert ids[0] == (IDENTITY.recipe_id, "snapshot" if engine == "hf" else "in_forward")
        assert len(set(ids)) == len(ids)


def test_a_codec_is_planned_under_each_protocol_and_says_which_tokens_it_stores(tiny_params):
    coded = [variant for variant in plan.variants(tiny_params, "hf") if variant.cell]
    assert {(v.protocol(()), v.span(()), v.label.rsplit(" ", 1)[1]) for v in coded} == {
        ("in_forward", "window", "in_forward"),
        ("snapshot", "context", "snapshot"),
    }
    asked = tiny_params.mechanisms.model_copy(update={"protocols": ("snapshot",)})
    alone = plan.variants(tiny_params.model_copy(update={"mechanisms": asked}), "hf")
    assert [v.label for v in alone] == [
        v.label for v in plan.variants(tiny_params, "hf") if "in_forward" not in v.label
    ]


def test_inside_the_forward_the_scored_tokens_own_keys_and_values_are_coded_and_counted(measured, tiny_params):
    record, table = measured("hf")
    inside, snapshot = (row(record, f"int 2 {protocol}") for protocol in ("in_forward", "snapshot"))
    windows = tiny_params.windows
    assert (inside.protocol, inside.span, snapshot.protocol, snapshot.span) == (
        "in_forward",
        "window",
        "snapshot",
        "context",
    )
    assert inside.kv_values * windows.context == snapshot.kv_values * windows.length
    assert inside.kv_bytes > snapshot.kv_bytes and inside.fires == snapshot.fires
    assert sum(scores(table, inside.label, "kl")) > sum(scores(table, snapshot.label, "kl"))


def test_what_the_evals_store_of_a_row_differs_no_more_than_the_gate_allows(measured):
    from kvlab.gate.evidence.faults import OTHER_TEXT

    record, _ = measured("hf")
    for found in record.rows:
        bits = [8 * run.kv_bytes / run.kv_values for run in found.evals]
        assert max(bits) <= min(bits) * (1 + OTHER_TEXT), (found.label, bits)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("protocols", "snapshot"),
        ("pages", "klt"),
        ("caches", "klt"),
        ("patterns", "window:window=12"),
        ("kept", "latent:rank=64"),
    ],
)
def test_each_is_asked_for_once(tiny_params, key, name):
    asked = tiny_params.mechanisms.model_copy(update={key: (name, name)})
    assert list(asked.problems(tiny_params)) == [f"mechanisms.{key} is ['{name}', '{name}']; allowed: each once"]


def test_a_codec_of_whole_caches_is_judged_on_finished_ones_alone(tiny_params):
    asked = tiny_params.mechanisms.model_copy(update={"protocols": ("in_forward",)})
    (problem,) = asked.problems(tiny_params)
    assert "names 'archive', which codes finished caches" in problem and problem.endswith("add snapshot")
    unsaid = Mechanisms(protocols=("in_forward",)).fitted(tiny_params)
    assert "archive" not in unsaid.codecs and "klt" in unsaid.codecs and not list(unsaid.problems(tiny_params))
    assert "archive" in Mechanisms().fitted(tiny_params).codecs
    with pytest.raises(ValidationError, match="'archive' is not allowed here"):
        Mechanisms(in_forward=("archive",))


def test_the_registry_knows_everything_that_is_planned(tiny_params):
    from kvlab.gate import registry

    known = registry.load()
    for variant in plan.variants(tiny_params, "vllm"):
        entry = known.mechanism(variant.mechanism, variant.variant)
        assert (entry.method, entry.scope) == (variant.method, variant.scope)
        assert variant.cell is None or variant.cell.recipe.k.codec in entry.codecs
        assert variant.cache_dtype is None or variant.cache_dtype in entry.kv_cache_dtypes
    for quality_eval_id, metrics in plan.METRICS.items():
        assert tuple(metric.key for metric in known.eval(quality_eval_id).metrics) == metrics


def test_the_engine_as_it_is_loses_nothing(measured):
    record, table = measured("hf")
    assert set(scores(table, "baseline", "kl")) == {0.0}
    assert set(scores(table, "baseline", "top1_agreement")) == {1.0}
    same = table.filter(pl.col("label") == "baseline")
    assert same["variant"].to_list() == same["baseline"].to_list()
    assert row(record, "baseline").kv_bytes == 4 * row(record, "baseline").kv_values


def test_a_codec_fires_on_every_layer_stream_and_item(measured, tiny_params, hf_engine):
    record, table = measured("hf")
    layers, windows = hf_engine.info.n_layers, tiny_params.windows.test
    found = row(record, "int 2 snapshot")
    assert found.fires == found.expected_fires == 2 * layers * windows
    asked = [windows, tiny_params.mechanisms.needles, windows]
    assert [run.items for run in found.evals] == asked
    assert [run.fires for run in found.evals] == [2 * layers * items for items in asked]
    assert 2 < 8 * found.kv_bytes / found.kv_values < 8
    assert min(scores(table, "int 2 snapshot", "kl")) > 0
    assert found.compression_overhead_ms > 0 < found.decompression_overhead_ms
    assert len(found.seconds) == windows and min(found.seconds) > 0
    tokens = tiny_params.windows.length
    assert tokens / max(found.seconds) <= found.throughput_tok_s * 1.001 <= tokens / min(found.seconds) * 1.002
    assert found.canary_kl > 0


def test_every_item_of_every_variant_is_in_the_table(measured, tiny_params):
    record, table = measured("hf")
    windows = tiny_params.windows.test
    counts = {"kv_fidelity": windows, "needle": tiny_params.mechanisms.needles, "greedy_agreement": windows}
    assert set(table["quality_eval_id"]) == set(counts)
    for quality_eval_id in counts:
        metrics = plan.METRICS[quality_eval_id]
        part = table.filter(pl.col("quality_eval_id") == quality_eval_id)
        asked = [one for one in record.rows if quality_eval_id in {run.quality_eval_id for run in one.evals}]
        assert part.height == len(asked) * len(metrics) * counts[quality_eval_id]
        assert len(asked) == len(record.rows) or {one.protocol for one in asked} == {"snapshot"}
        assert part.select("label", "metric", "item").is_unique().all()


def test_numbers_are_the_same_when_measured_again_beside_fewer_others(
    measured, tiny_params, tiny_windows, tiny_needles, tiny_fitted, tmp_path
):
    out, fewer = tmp_path / "hf.parquet", {"codecs": ("klt", "archive"), "in_forward": ("klt",)}
    asked = tiny_params.model_copy(update={"mechanisms": tiny_params.mechanisms.model_copy(update=fewer)})
    measuring.mechanisms(asked, "hf", tiny_windows, tiny_needles, {"hf": tiny_fitted}, "code", out)
    again = records.read_mechanisms(out)[1]
    assert set(again["label"]) == {"baseline", "klt 2 in_forward", "klt 2 snapshot", "archive 2 snapshot"}
    before = measured("hf")[1].filter(pl.col("label").is_in(again["label"].unique().to_list()))
    by = ["label", "quality_eval_id", "metric", "item"]
    assert again.sort(by).equals(before.sort(by))


@AVX512
def test_vllms_own_cache_is_measured_beside_the_codecs(measured):
    record, table = measured("vllm")
    assert record.missing == ()
    for label in ("fp8_e4m3", "fp8_e5m2"):
        found = row(record, label)
        assert [run.quality_eval_id for run in found.evals] == list(plan.PASSED)
        assert (found.kv_cache_dtype, found.codec) == (label, None)
        assert (found.protocol, found.span) == ("in_forward", "window")
        assert found.kv_bytes == found.kv_values
        assert found.canary_kl == pytest.approx(sum(kl := scores(table, label, "kl")) / len(kl))
    coarse, fine = (sum(scores(table, label, "kl")) for label in ("fp8_e5m2", "fp8_e4m3"))
    assert coarse > fine > 0


def test_what_a_machine_cannot_run_is_said(
    tiny_params, tiny_windows, tiny_needles, tiny_fitted, hf_engine, monkeypatch
):
    def start(*args, cache_dtype="auto", **named):
        if cache_dtype != "auto":
            raise CapabilityError("no AVX-512 here")
        return Lent(hf_engine)

    monkeypatch.setattr(registry, "start", start)
    monkeypatch.setattr(lab_engines, "refuse_impostor", lambda *_: None)
    with Lab.open(tiny_params, tiny_windows, {"hf": tiny_fitted}) as lab:
        part = measuring.MechanismsPart(lab, "vllm", tiny_needles, "code", None)
    assert [(one.label, one.reason) for one in part.missing] == [
        ("fp8_e4m3", "no AVX-512 here"),
        ("fp8_e5m2", "no AVX-512 here"),
    ]
    own = tiny_params.mechanisms.cache_dtypes
    assert [variant.label for variant in part.variants] == [
        v.label for v in plan.variants(tiny_params, "vllm") if v.label not in own
    ]


def test_on_an_accelerator_an_engines_own_cache_is_not_scored_in_a_prompts_pass():
    subjects.refuse_unread("cpu", "fp8_e4m3")
    with refused(CapabilityError, "capability.unread", "fp8_e4m3", "NVIDIA X"):
        subjects.refuse_unread("NVIDIA X", "fp8_e4m3")


def test_engines_are_closed_when_a_later_one_fails(
    tiny_params, tiny_windows, tiny_needles, tiny_fitted, hf_engine, monkeypatch, tmp_path
):
    closed = []

    def start(*_args, cache_dtype="auto", **_named):
        if cache_dtype != "auto":
            raise KeyboardInterrupt
        engine = Lent(hf_engine)
        engine.close = lambda: closed.append("plain")
        return engine

    monkeypatch.setattr(registry, "start", start)
    monkeypatch.setattr(lab_engines, "refuse_impostor", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        measuring.mechanisms(
            tiny_params, "vllm", tiny_windows, tiny_needles, {"hf": tiny_fitted}, "code", tmp_path / "x"
        )
    assert closed == ["plain"]


def serving(params):
    """The parameters with two codecs in the Cache."""
    few = {"caches": ("klt", "int"), "codecs": ("fp8",), "greedy": 0}
    return params.model_copy(update={"mechanisms": params.mechanisms.model_copy(update=few)})


def test_the_cache_is_planned_on_transformers_and_stands_in_place_of_taps_there(tiny_params):
    hf, vllm = ([v.label for v in plan.variants(serving(tiny_params), engine)] for engine in ("hf", "vllm"))
    assert hf == ["baseline", "klt 2 served", "int 2 served", "fp8 snapshot"]
    assert not any("served" in label for label in vllm) and any("in_forward" in label for label in vllm)
    cells = [v for v in plan.variants(serving(tiny_params), "hf") if v.cell]
    assert {(v.protocol(()), v.span(()), v.tapped) for v in cells} == {
        ("served", "window", False),
        ("snapshot", "context", True),
    }


def test_in_the_cache_each_scored_token_reads_what_was_stored(
    tiny_params, tiny_windows, tiny_needles, tiny_fitted, hf_engine, engine_of, monkeypatch, tmp_path
):
    monkeypatch.setattr(registry, "start", engine_of)
    out = tmp_path / "hf.parquet"
    given = tiny_windows, tiny_needles, {"hf": tiny_fitted}, "code", out
    measuring.mechanisms(serving(tiny_params), "hf", *given)
    record, table = records.read_mechanisms(out)
    layers, windows, tokens = hf_engine.info.n_layers, tiny_params.windows, tiny_params.mechanisms.cached_tokens
    for label in ("klt 2 served", "int 2 served"):
        found = row(record, label)
        assert (found.protocol, found.span, found.cache_class) == ("served", "window", "KVCache")
        assert [run.quality_eval_id for run in found.evals] == list(plan.PASSED)
        assert found.kv_values == windows.test * (windows.context + tokens) * hf_engine.info.values_per_token
        assert found.fires == found.expected_fires >= 2 * layers * windows.test * (1 + tokens)
        assert 2 < 8 * found.kv_bytes / found.kv_values < 8 and found.throughput_tok_s is None and not found.seconds
        assert found.canary_kl > CANARY_MIN and found.witnessed_kl < 1e-5
        assert min(scores(table, label, "kl")) > 0
    unseen = tuple(one.model_copy(update={"witnessed_kl": None}) for one in record.rows)
    with refused(WitnessDisagrees, "witness.none", "klt 2 served"):
        records.refuse_impossible(record.model_copy(update={"rows": unseen}), out)


def test_a_window_is_asked_token_by_token_and_a_question_at_once():
    text = Window("test", 0, tuple(range(20)), 8)
    assert cached.request_of(text, 3).calls == ((8,), (9,), (10,)) and cached.request_of(text, 3).labels.tolist() == [
        9,
        10,
        11,
    ]
    needle = Window("needle", 0, tuple(range(20)), 8, first=6)  # of 12 tokens after the context the last 5 answer
    assert cached.request_of(needle, 16).calls == (tuple(range(8, 15)), (15,), (16,), (17,), (18,))
    assert cached.request_of(needle, 16).labels.tolist() == [15, 16, 17, 18, 19]


def test_what_the_cache_says_is_what_generate_writes(tiny_params, hf_engine):
    """The most likely tokens of the calls are those that transformers' own loop writes with the same cache."""
    from kvlab.cache.hf.kv_cache import KVCache

    recipe = Recipe(k=HadamardStream(bits=3), v=HadamardStream(bits=3))
    prompt, steps = list(range(5, 45)), 6
    made = lambda: KVCache(hf_engine.model, recipe, compiled=False)  # noqa: E731
    written = hf_engine.model.generate(
        torch.tensor([prompt]), past_key_values=made(), max_new_tokens=steps, min_new_tokens=steps, do_sample=False
    )[0].tolist()
    window, cache = Window("test", 0, tuple(written), len(prompt)), made()
    cached.called(hf_engine, cache, window.ids[: window.context])
    logits = cached.logits(hf_engine, cache, cached.request_of(window, steps - 1))
    assert logits.argmax(-1).tolist() == written[len(prompt) + 1 :]


@pytest.mark.parametrize(
    "stream", [HadamardStream(bits=3), HadamardStream(bits=3, sink=2, recent=3), Fp8Stream(), IdentityStream()]
)
def test_a_filled_cache_is_the_one_that_saw_the_context(hf_engine, stream):
    """What transformers' own cache was given, coded, is to the bit what a forward with the Cache comes to."""
    from kvlab.cache.hf.kv_cache import KVCache

    window = Window("test", 0, tuple(range(5, 55)), 40)
    request = cached.request_of(window, 6)
    plain = cached._plain(hf_engine, window, request)
    own, filled = (KVCache(hf_engine.model, Recipe(k=stream, v=stream), window_bytes=None) for _ in range(2))
    cached.called(hf_engine, own, window.ids[: window.context])
    filled.fill(plain.context)
    for _ in range(2):
        assert filled.coding() == own.coding() and filled.nbytes == own.nbytes
        assert all(
            torch.equal(a, b)
            for layer in range(hf_engine.info.n_layers)
            for a, b in zip(filled.decoded(layer), own.decoded(layer), strict=True)
        )
        assert torch.equal(*(cached.logits(hf_engine, one, request) for one in (filled, own)))
    with refused(CapabilityError, "capability.fill"):
        filled.fill(plain.context)


@pytest.mark.parametrize("fault", ["deaf", "lossy"])
def test_a_cache_that_is_not_read_or_adds_a_loss_of_its_own_is_no_measurement(
    tiny_params, tiny_windows, tiny_needles, tiny_fitted, engine_of, monkeypatch, tmp_path, fault
):
    real, first = cached.logits, {}

    def faulty(engine, cache, request):
        found = real(engine, cache, request)
        plain = first.setdefault(request.calls, found)
        if fault == "deaf":
            return plain
        return found if plain is found else found + torch.linspace(0, 1, found.shape[-1])

    monkeypatch.setattr(cached, "logits", faulty)
    monkeypatch.setattr(registry, "start", engine_of)
    given = tiny_windows, tiny_needles, {"hf": tiny_fitted}, "code", tmp_path / "x.parquet"
    error, code = {"deaf": (CodecNotActive, "not-active.canary"), "lossy": (Fault, "fault.floor")}[fault]
    with refused(error, code):
        measuring.mechanisms(serving(tiny_params), "hf", *given)
    assert not list(tmp_path.iterdir())


def test_seconds_are_the_engines_own_pass_and_the_coding(measured):
    """However a cell is scored: what judging it and scoring it over the coded cache take is no part of it."""
    record, _ = measured("hf")
    plain, coded = row(record, "baseline"), row(record, "int 2 snapshot")
    own = zip(coded.seconds, plain.seconds, strict=True)
    extra = sorted(1e3 * (whole - pass_) for whole, pass_ in own)
    assert extra[0] > 0
    assert extra[0] <= coded.compression_overhead_ms + coded.decompression_overhead_ms <= 1.5 * extra[-1]


class Answering:
    """Stands in for an engine: its most likely next token is the one that `text` has there."""

    name, dtype, device = "hf", "float32", "cpu"

    def __init__(self, text: list[int]):
        self.text = text

    def score(self, ids, first, tap=None, placement="pre_rope"):
        return torch.nn.functional.one_hot(torch.tensor(self.text[first + 1 : len(ids)]), 100).float()

    def score_heard(self, ids, first, tap=None, placement="pre_rope"):
        return self.score(ids, first), None


@pytest.mark.parametrize(
    ("place", "token", "found"), [(None, None, 1.0), (11, 99, 0.0), (12, 99, 0.0), (10, 99, 1.0), (13, 99, 0.0)]
)
def test_a_needle_is_found_where_every_token_of_the_answer_is_the_most_likely(place, token, found):
    needle = Needle(context=list(range(8)), question=[20, 21, 22], answer=[30, 31, 32], depth=0.0)
    (item,) = items.retrievals(Needles((needle,), 8, "hash", "model"))
    text = list(item.ids)
    if place is not None:
        text[place] = token
    run = WindowRun(Answering(text), item.ids, item.context, item.number)
    reference = run.comparable(run.reference, item.first)
    assert reference.labels.tolist() == needle.answer
    assert items.answered(reference, reference.logits) == {"needle_recall": found}


def test_what_is_found_is_what_greedy_decoding_writes(root, base_params, tmp_path):
    from kvlab.core.paramfile import overlay
    from kvlab.text.needles import build, sequence
    from kvlab_pipeline.studies.settings import Settings

    fewer = {"mechanisms": {"needles": 4}, "kvstore": {"policy": {"needles": 4}}}
    params = Settings.complete(overlay(base_params, fewer))
    planted = build(params, tmp_path / "needles.parquet")
    info = resolve(params.model)
    engine = real_start("hf", info, "float32", max_tokens=640)
    for needle, item in zip(planted.items, items.retrievals(planted), strict=True):
        run = WindowRun(engine, item.ids, item.context, item.number)
        rows, labels = run.reference[item.first :], run.labels[item.first :]
        asked = torch.tensor([[*needle.context, *needle.question]])
        written = engine.model.generate(
            asked, max_new_tokens=len(needle.answer), do_sample=False, attention_mask=torch.ones_like(asked)
        )
        same = written[0, asked.shape[1] :].tolist() == needle.answer
        assert items.answered(ReferenceLogits(rows, labels), rows)["needle_recall"] == float(same)
        assert sequence(needle)[0] == list(item.ids)


def test_a_cache_that_attention_does_not_read_is_no_measurement(
    tiny_params, tiny_windows, tiny_needles, tiny_fitted, hf_engine, monkeypatch, tmp_path
):
    monkeypatch.setattr(registry, "start", lambda *_args, **_named: Lent(hf_engine))
    monkeypatch.setattr(lab_engines, "refuse_impostor", lambda *_: None)
    with refused(CodecNotActive, "not-active.unread", "fp8_e4m3"):
        measuring.mechanisms(
            tiny_params, "vllm", tiny_windows, tiny_needles, {"hf": tiny_fitted}, "code", tmp_path / "x.parquet"
        )
    assert not list(tmp_path.iterdir())


def test_needles_of_another_context_are_refused(
    tiny_params, tiny_windows, tiny_needles, tiny_fitted, monkeypatch, tmp_path
):
    from dataclasses import replace

    from kvlab.text import needles

    load = needles.load
    monkeypatch.setattr(measuring.needles, "load", lambda *args: replace(load(*args), context=63))
    with refused(CorpusError, "corpus.other-context", 63, 64, "`kvlab step needles`"):
        measuring.mechanisms(
            tiny_params, "hf", tiny_windows, tiny_needles, {"hf": tiny_fitted}, "code", tmp_path / "x.parquet"
        )


def test_a_damaged_result_is_refused(measured, tmp_path):
    record, table = measured("hf")
    out = tmp_path / "hf.parquet"
    records.write_mechanisms(out, record, table)
    table.drop("item").write_parquet(out)
    with refused(StorageError, "storage.columns"):
        records.read_mechanisms(out)
    table.with_columns(variant=pl.lit(float("nan"))).write_parquet(out)
    with refused(NonFinite, None, "variant"):
        records.read_mechanisms(out)
    out.with_suffix(".json").write_text("{}")
    with refused(StorageError, "storage.no-record"):
        records.read_mechanisms(out)
