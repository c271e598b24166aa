"""Effects planted by facts, found by labels: through both engines, both dtypes and the result files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvlab.core.errors import EnginesDisagree, Fault
from kvlab.core.paramfile import overlay
from kvlab.core.records import read_job
from kvlab.engines import registry
from kvlab.measure import engines
from kvlab.stats.bootstrap import Bootstrap
from kvlab.stats.shapley import interactions, shapley
from kvlab.text import corpus
from kvlab_pipeline.jobs import measure
from kvlab_pipeline.studies import gather
from kvlab_pipeline.studies.factors import numbers
from kvlab_pipeline.studies.settings import Settings
from refusals import refused
from validation.planted import factorial, relabelled
from validation.planted.claims import recover

pytestmark = pytest.mark.engine
BOOT = Bootstrap(500, 0.95, 0)
WINDOWS = 16  # with those of the session, four, an interval for thirty values together holds nearly anything


@pytest.fixture(scope="module")
def start(hf_engine, vllm_engine):
    """`registry.start` that gives the session's float32 engines; others are started."""
    session, real = {"hf": hf_engine, "vllm": vllm_engine}, registry.start

    def started(name, info, dtype, *given, **named):
        return session[name] if dtype == "float32" else real(name, info, dtype, *given, **named)

    return started


@pytest.fixture(scope="module")
def write(start, tiny_params, hf_engine, vllm_engine, tmp_path_factory):
    """Runs the planted jobs of some engines in some dtypes on the tiny model."""
    more = Settings.complete(overlay(tiny_params.model_dump(mode="json"), {"windows": {"test": WINDOWS}}))
    windows = corpus.build(more, tmp_path_factory.mktemp("corpus") / "windows.safetensors")

    def written(engines, dtypes):
        params = Settings.complete(
            overlay(tiny_params.model_dump(mode="json"), {"engines": engines, "calibration": {"engines": engines}})
            | {"gap": {}}
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "start", start)
            for engine in (hf_engine, vllm_engine):
                patch.setattr(engine, "close", lambda: None)
            return factorial.write_files(params, windows, tmp_path_factory.mktemp("files"), dtypes)

    return written


@pytest.fixture(scope="module")
def both_engines(write):
    return write(["hf", "vllm"], ["float32"])


@pytest.fixture(scope="module")
def both_dtypes(write):
    return write(["hf"], ["float32", "bfloat16"])


@pytest.fixture(
    params=[
        pytest.param("both_engines", marks=pytest.mark.full),
        pytest.param("both_dtypes", marks=pytest.mark.nightly),
    ]
)
def files(request):
    return request.getfixturevalue(request.param)


def missed(claims):
    return [one.claim.name for one in recover(BOOT, claims) if not one.holds]


def test_what_is_planted_by_facts_is_found_by_labels(files):
    case = factorial.case(files)
    assert missed(case.claims) == []
    exact = [one for one in recover(BOOT, case.claims) if not one.claim.chance]
    assert len(exact) == 3 and all(abs(one.estimate.value - one.claim.planted) < 1e-9 for one in exact)
    paths = {claim.path for claim in case.claims if claim.chance}
    assert len(paths) == 4  # two ways of corners, and the two entries


@pytest.mark.full
def test_the_files_are_those_of_the_pipeline(both_engines):
    """Canaries are of the real codec, and every codec fired on every layer, stream and window."""
    for path in both_engines.paths:
        record, _ = read_job(path)
        coded = [one for one in record.cells if one.cell.label == "kv"]
        assert len(coded) == 8 and all(one.coding.fires == one.coding.expected_fires > 0 for one in coded)
        assert all(one.canary_kl > 1e-3 for one in record.cells if one.cell.layers)


def test_exchanged_labels_are_found_out(files):
    found = relabelled.controls(files, BOOT, factorial.case(files).claims)
    varied = "engine" if len(files.params.engines) == 2 else "dtype"
    assert {one["factor"] for one in found} == {varied, "protocol"}
    assert all(one["refused"] and one["missed"] > 0 and one["row"] > 0.5 and one["holds"] for one in found), found


def test_files_that_nobody_exchanged_are_no_control(files, monkeypatch):
    """A control whose labels stay as they are finds nothing, and says so."""
    monkeypatch.setattr(relabelled, "relabelled", lambda cell, factor, levels: cell)
    found = relabelled.controls(files, BOOT, factorial.case(files).claims)
    assert not any(one["refused"] or one["missed"] or one["holds"] for one in found)


@pytest.mark.full
@pytest.mark.parametrize("ignored", ["protocol", "variance_ratio", "origin", "engine"])
def test_a_corner_taken_for_another_is_found_out(both_engines, monkeypatch, ignored):
    """`corner_cell` with one factor always low: a mislabelling that no file shows."""
    corner_cell, low = numbers.corner_cell, factorial.LEVELS[ignored][0]
    monkeypatch.setattr(numbers, "corner_cell", lambda *given, **levels: corner_cell(*given, **levels | {ignored: low}))
    assert any(f"`{ignored}`" in name for name in missed(factorial.case(both_engines).claims))


@pytest.mark.nightly
def test_an_engine_under_anothers_name_is_found_out(write, start, hf_engine):
    """The job of vLLM runs transformers: refused at its start, by what it leaves behind, and by the numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "start", lambda *given, **named: hf_engine)
        with refused(Fault, "fault.other-engine", "vllm", "transformers"):
            other(write, patch, hf_engine)
        patch.setattr(engines, "refuse_impostor", lambda *_: None)
        files = other(write, patch, hf_engine)
        with refused(EnginesDisagree, "engines-disagree.other-engine", "vllm"):
            factorial.case(files)
        patch.setattr(gather, "refuse_one_engine", lambda *_: None)
        assert "share of `engine`" in missed(factorial.case(files).claims)


def other(write, patch, engine):
    """Files of both engines' jobs, all of them run by one."""
    real = factorial.in_place

    def always(planted):
        patch.setattr(registry, "start", lambda *given, **named: engine)
        return real(planted)

    patch.setattr(factorial, "in_place", always)
    return write(["hf", "vllm"], ["float32"])


@pytest.mark.nightly
def test_another_origins_calibration_is_found_out(write, monkeypatch):
    """The job reads one origin's numbers for both."""
    real = measure.calibrated_for
    monkeypatch.setattr(measure, "calibrated_for", lambda cell, given: real(cell, dict.fromkeys(given, given["hf"])))
    assert "share of `origin`" in missed(factorial.case(write(["hf", "vllm"], ["float32"])).claims)


def test_planted_parts_are_the_factorial_s_shapley_values():
    corners = [dict(zip(factorial.LEVELS, choice, strict=True)) for choice in grid()]
    means = np.array([factorial.planted_mean(corner) for corner in corners])
    half = factorial.TOGETHER / 2
    expected = [part + (half if name in factorial.PAIR else 0) for name, part in factorial.PARTS.items()]
    assert shapley(means) == pytest.approx(expected)
    assert interactions(means).max() == pytest.approx(factorial.TOGETHER)


def grid():
    """Levels of every corner, by corner index: bit j of it is factor j's."""
    levels = list(factorial.LEVELS.values())
    return [[both[i >> j & 1] for j, both in enumerate(levels)] for i in range(2 ** len(levels))]


@pytest.mark.full
def test_another_share_is_found_out(both_engines):
    case = factorial.case(both_engines)
    named = {"gap", "share of `variance_ratio`", "share of `engine`"}
    assert set(missed([replace(c, planted=2 * c.planted) for c in case.claims if c.name in named])) == named
