"""Coded pages of vLLM as rows for the gate: planned, measured through the engine that serves them, or refused."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from kvlab.calibration.load import load
from kvlab.codecs.hadamard import HadamardStream
from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.core.recipe import Recipe, digest
from kvlab.core.records import CANARY_MIN
from kvlab.core.testimony import Pool, Proof, Served
from kvlab.engines import registry
from kvlab.gate import registry as gate_registry
from kvlab.gate.catalogue import EVIDENCE
from kvlab.gate.evidence import problems
from kvlab.measure import engines as lab_engines
from kvlab.measure import paged
from kvlab.measure.engines import Engines, Which
from kvlab.measure.paged_process import PagedPass, Started
from kvlab_pipeline.gate_page.measured_rows import rows_of
from kvlab_pipeline.jobs.measure import Lab
from kvlab_pipeline.studies.mechanisms import measure as measuring
from kvlab_pipeline.studies.mechanisms import plan, records
from kvlab_pipeline.studies.mechanisms.subjects import passed
from pipeline.studies.test_mechanisms import Lent, engine_of, row, scores, tiny_needles
from refusals import refused

__all__ = ["engine_of", "tiny_needles"]  # fixtures
BARE, SINK, RECENT = {"pages_sink": 0, "pages_recent": 0, "pages_rotary": "before"}, 2, 8
BACKEND = "kvlab.cache.pages.backend.PagesImpl"


def asking(params, **asked):
    """The parameters with pages of `klt`, and the same codec inside the forward by hooks."""
    few = {"codecs": ("klt",), "in_forward": ("klt",), "cache_dtypes": (), "pages": ("klt",)}
    return params.model_copy(update={"mechanisms": params.mechanisms.model_copy(update=few | asked)})


# ---------------------------------------------------------------------------------------- what is planned


def test_pages_are_planned_on_vllm_alone_at_every_bits(tiny_params):
    asked = asking(tiny_params, pages=("klt", "hadamard"), bits=(2, 4))
    found = {v.label: v for v in plan.variants(asked, "vllm") if v.paged}
    assert list(found) == ["klt 2 pages", "klt 4 pages", "hadamard 2 pages", "hadamard 4 pages"]
    assert not any(v.paged for v in plan.variants(asked, "hf"))
    simulated = {v.label: v for v in plan.variants(asked, "vllm") if v.tapped}
    one, other = found["klt 2 pages"], simulated["klt 2 in_forward"]
    assert one.variant == "klt_after_pages" and other.variant == "klt" and one.recipe_id != other.recipe_id
    own, simulated = one.cell.recipe.k, other.cell.recipe.k
    alike = {"sink": 0, "recent": 0, "escape": simulated.escape}
    assert own.model_copy(update=alike) == simulated and (own.sink, own.recent) == (4, 128)
    assert (one.cell.recipe.rotary, one.cell.placement) == ("after", "post_rope")
    (before,) = (v for v in plan.variants(asking(tiny_params, pages_rotary="before"), "vllm") if v.paged)
    assert (before.variant, before.cell.recipe.rotary) == ("klt_pages", "before")
    (bare,) = (v for v in plan.variants(asking(tiny_params, **BARE), "vllm") if v.paged)
    assert bare.recipe_id == other.recipe_id
    assert (one.protocol(("snapshot",)), one.span(()), one.tapped) == ("in_forward", "window", False)
    known = gate_registry.load()
    for variant in found.values():
        entry = known.mechanism(variant.mechanism, variant.variant)
        assert (entry.method, entry.scope, entry.kv_cache_dtypes) == (variant.method, variant.scope, ("uint8",))
        assert entry.codecs == (variant.cell.recipe.k.codec,) and entry.backends == (BACKEND,)


def test_the_registered_backend_is_the_one_that_is_there():
    from importlib import import_module

    module, _, name = BACKEND.rpartition(".")
    pytest.importorskip("vllm")
    assert getattr(import_module(module), name)


# -------------------------------------------------------------------------------- what a running engine says

POOL = Pool(block_tokens=32, block_bytes=64, block_values=128, cache_blocks=7, cache_memory_bytes=500)
DUE = Served(recipe_id="planted", calibration=None)
STARTED = Started(
    storage={"dtype": "uint8", "cache": "Pages", "itemsize": 1},
    proof=Proof(library="vllm", version="0", model="M", attention=BACKEND, cache_blocks=7),
    pool=POOL,
    recipe_id="planted",
    calibration_hash=None,
    canary_kl=5.0,
)


@pytest.mark.parametrize("other", [{"recipe_id": "another"}, {"calibration_hash": "another fit"}])
def test_an_engine_that_codes_by_something_else_is_refused(tmp_path, other):
    paged.refuse_other(STARTED, DUE, tmp_path / "coded.json")
    with refused(CodecNotActive, "not-active.other-recipe", *other.values()):
        paged.refuse_other(STARTED.model_copy(update=other), DUE, tmp_path / "coded.json")


def test_the_calibration_is_named_as_a_row_names_it(tiny_fitted, hf_engine, tiny_params, tmp_path):
    calibrated = load(tiny_fitted, hf_engine.info.model_hash, info=hf_engine.info)
    (variant,) = (v for v in plan.variants(asking(tiny_params), "vllm") if v.paged)
    file, due = paged.written(tmp_path, variant.cell.recipe, calibrated, hf_engine.info)
    assert due == Served(recipe_id=variant.recipe_id, calibration=digest({"hf": calibrated.sigma_hash}))
    told = paged.read_header(file)
    started = STARTED.model_copy(update={"recipe_id": due.recipe_id, "calibration_hash": told.calibration_hash})
    paged.refuse_other(started, due, file)
    with refused(CodecNotActive, "not-active.other-recipe", "another fit"):
        paged.refuse_other(started.model_copy(update={"calibration_hash": "another fit"}), due, file)
    plain, own = paged.written(tmp_path, Recipe(k=HadamardStream(bits=4), v=HadamardStream(bits=4)), None, None)
    assert plain.suffix == ".json" and own.calibration is None


@pytest.mark.parametrize(("fires", "tokens"), [(5, 96), (6, 95), (0, 0), (12, 192)])
def test_a_window_that_was_not_coded_once_and_whole_is_refused(fires, tokens):
    engine = SimpleNamespace(info=SimpleNamespace(n_layers=3), served=DUE, canary_kl=5.0)
    window = SimpleNamespace(ids=tuple(range(96)))
    said = {"seconds": 1.0, "dtype": "float32", "width": 9}
    engine.passed = PagedPass(fires=6, tokens=96, **said)
    assert passed(engine, window)["fires"] == 6
    engine.passed = PagedPass(fires=fires, tokens=tokens, **said)
    with refused(CodecNotActive, "not-active.other-window", tokens, fires):
        passed(engine, window)


def test_pages_of_two_recipes_or_calibrations_are_two_engines(hf_engine):
    engines, plain = Engines(hf_engine.info, 96), Which.of("vllm", "float32")
    recipes = [Recipe(k=HadamardStream(bits=bits), v=HadamardStream(bits=4)) for bits in (3, 4)]
    fits = [None, SimpleNamespace(calibration_hash="one"), SimpleNamespace(calibration_hash="other")]
    found = {engines.coding(plain, recipe, fit) for recipe in recipes for fit in fits}
    assert len(found | {plain}) == 7
    assert engines.coding(plain, recipes[0], None) in found
    assert set(next(iter(found)).modules) - set(plain.modules) == {"kvlab.measure.paged"}


def test_what_pages_cannot_hold_here_is_a_row_that_says_why(
    tiny_params, tiny_windows, tiny_needles, tiny_fitted, hf_engine, monkeypatch
):
    def refusing(*_given):
        raise CapabilityError("no pages here")

    monkeypatch.setattr(registry, "start", lambda *_args, **_named: Lent(hf_engine))
    monkeypatch.setattr(lab_engines, "refuse_impostor", lambda *_: None)
    monkeypatch.setattr(paged, "PagedEngine", refusing)
    with Lab.open(asking(tiny_params), tiny_windows, {"hf": tiny_fitted}) as lab:
        part = measuring.MechanismsPart(lab, "vllm", tiny_needles, "code", None)
    (missing,) = part.missing
    told = (missing.label, missing.mechanism_variant, missing.reason)
    assert told == ("klt 2 pages", "klt_after_pages", "no pages here")


# ----------------------------------------------------------------------------------------- in a running vLLM


@pytest.fixture(scope="module")
def measured(tiny_params, tiny_windows, tiny_needles, tiny_fitted, tmp_path_factory, engine_of, vllm_engine):
    """The record and the table of vLLM with pages, measured once: the one start of coded pages here."""
    out = tmp_path_factory.mktemp("pages") / "vllm.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "start", engine_of)
        asked = asking(tiny_params, pages_sink=SINK, pages_recent=RECENT)
        measuring.mechanisms(asked, "vllm", tiny_windows, tiny_needles, {"hf": tiny_fitted}, "code", out)
    return records.read_mechanisms(out)


@pytest.mark.nightly
@pytest.mark.engine
def test_the_bytes_are_the_pages_by_vllms_own_count(measured, vllm_engine):
    record, _ = measured
    found, plain, info = row(record, "klt 2 pages"), row(record, "baseline"), vllm_engine.info
    assert (found.kv_cache_dtype, found.cache_class, found.backend, found.codec) == ("uint8", "Pages", BACKEND, "klt")
    assert found.pool.block_values == found.pool.block_tokens * info.values_per_token
    assert plain.pool.block_bytes == 4 * plain.pool.block_values and plain.backend != BACKEND
    exact = (SINK + RECENT) * 4 * info.values_per_token
    assert (found.pool.exact_bytes, found.pool.exact_requests) == (exact, 1)
    for run in found.evals:
        paged_bytes = run.kv_bytes - run.items * exact
        assert paged_bytes * found.pool.block_values == run.kv_values * found.pool.block_bytes
    assert found.pool.cache_memory_bytes == plain.pool.cache_memory_bytes
    assert found.pool.cache_blocks == (found.pool.cache_memory_bytes - exact) // found.pool.block_bytes
    assert found.pool.capacity_tokens > 6 * plain.pool.capacity_tokens
    assert row(record, "klt 2 in_forward").pool is None  # a codec beside the cache says nothing of its pages


@pytest.mark.nightly
@pytest.mark.engine
def test_what_ran_is_told_by_the_engine(measured, tiny_params, vllm_engine):
    record, _ = measured
    found = row(record, "klt 2 pages")
    assert found.served == Served(recipe_id=found.recipe_id, calibration=digest(record.provenance.calibration))
    assert found.fires == found.expected_fires == 2 * vllm_engine.info.n_layers * tiny_params.windows.test
    assert found.canary_kl > CANARY_MIN and found.compression_overhead_ms is None
    assert len(found.seconds) == tiny_params.windows.test and min(found.seconds) > 0


@pytest.mark.nightly
@pytest.mark.engine
def test_exact_tokens_make_pages_cost_less_than_the_same_codec_inside_the_forward(measured):
    _, table = measured
    one, other = (sum(scores(table, f"klt 2 {way}", "kl")) for way in ("pages", "in_forward"))
    assert 0 < one < 0.8 * other


@pytest.mark.nightly
@pytest.mark.engine
def test_the_gate_finds_nothing_wrong_with_its_evidence(measured):
    record, table = measured
    made = next(one for one in rows_of(record, table, "supported") if one.get("mechanism_variant") == "klt_after_pages")
    pieces = made.pop(EVIDENCE)
    assert made["row_id"].endswith("/vllm/klt-2-pages") and made["capacity_tokens"] > 0 and len(pieces) == 2
    known = gate_registry.load()
    found = [reason for piece in pieces for reason in problems(piece, made, known)]
    assert {reason.code for reason in found} <= {"evidence_outside_band"}  # the tiny model's contexts are short


@pytest.mark.parametrize(("started", "error"), [(None, CapabilityError), (object(), CodecNotActive)])
def test_a_process_that_has_ended_is_told_in_one_line(started, error):
    """One that never started is a row that says so; one that broke off ends the job."""
    engine = paged.PagedEngine.__new__(paged.PagedEngine)
    engine._pipe, other = Pipe()
    other.close()
    engine._process, engine._started = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]), started
    for ask in (lambda: engine._asked({}), lambda: engine._over_the_pipe(engine._pipe.recv_bytes)):
        with refused(error, f"{error.code}.process-ended", 3):
            ask()
