"""The codecs beside one another: planted costs, rivals, answers with ties, and both texts apart."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.codecs.klt import KltStream
from kvlab.codecs.shared.components import fit
from kvlab.core.errors import MissingResult, MixedIdentity, ParamsError
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.rendering.basis import Basis
from kvlab_pipeline.report import figures, findings
from kvlab_pipeline.report.claims import resolved, sentence
from kvlab_pipeline.report.metrics import build
from kvlab_pipeline.studies.ladder.chapter import (
    by_limits,
    claims,
    context,
    ladder_table,
    picked,
    plain_rows,
    series_of,
)
from kvlab_pipeline.studies.ladder.facts import gains, of_rows
from kvlab_pipeline.studies.ladder.numbers import SAME_BITS, Rung, limit_of
from kvlab_pipeline.studies.ladder.plan import ablations
from kvlab_pipeline.studies.ladder.state import State, state_of
from kvlab_pipeline.studies.processes import units
from kvlab_pipeline.studies.settings import Settings
from pipeline.report.conftest import no_drawing  # noqa: F401 (a fixture)
from pipeline.report.planted_facts import GAIN
from pipeline.report.synthetic import Effects, small_params, write_results
from refusals import refused

TWO_TEXTS = {"corpus": {"scored": ["other", "test"]}}


@pytest.fixture(scope="module")
def params() -> Settings:
    return small_params(studies=["ladder"], **TWO_TEXTS)


@pytest.fixture(scope="module")
def metrics(params, tmp_path_factory) -> dict:
    return build(params, write_results(tmp_path_factory.mktemp("ladder"), params).sources)


def planted(label: str) -> float:
    codec, _, bits = label.partition(" ")
    return (0.5 if codec == "klt" else 1.0) * Effects().base * 4.0 ** (3 - int(bits or 6))


def test_the_ladder_is_measured_whether_or_not_it_is_asked_for(params):
    assert "ladder" in plan.STUDIES and "ladder" in plan.studies(params)
    other = small_params(studies=["layers"])
    assert "ladder" not in plan.studies(other) and "ladder" in plan.targets(other)
    for one in (params, other):
        assert [name for name, contents in units(one).items() if "ladder" in contents] == ["ladder"]


def test_every_rung_is_there_on_each_text_and_both_texts_make_up_what_was_planted(params, metrics):
    less = {one.label for one in ablations(params)}
    labels = {cell.label for cell in plan.study_cells(params, "ladder", "hf")} - less
    assert {row["label"] for row in metrics["ladder_ablation"]} == less
    assert {(row["text"], row["label"]) for row in metrics["ladder"]} == {
        (t, one) for t in ("other", "test") for one in labels
    }
    for label in labels:
        rows = [row["kl"] for row in plain_rows(metrics) if row["label"] == label]
        assert sum(row["n_windows"] for row in rows) == params.ladder.windows
        mean = sum(row["value"] * row["n_windows"] for row in rows) / params.ladder.windows
        assert mean == pytest.approx(planted(label), rel=1e-9)


def test_the_rival_is_of_another_codec_and_stores_no_more(metrics):
    rows = {(row["text"], row["label"]): row for row in plain_rows(metrics)}
    for row in plain_rows(metrics):
        able = [
            other
            for other in plain_rows(metrics)
            if other["text"] == row["text"]
            and other["codec"] != row["codec"]
            and other["bits_per_value"] <= row["bits_per_value"] * (1 + SAME_BITS)
        ]
        best = min(able, key=lambda other: other["kl"]["value"], default=None)
        assert row["rival"] == (best and best["label"])
        if best:
            apart = row["kl"]["value"] - rows[row["text"], row["rival"]]["kl"]["value"]
            assert row["difference"]["value"] == pytest.approx(apart, abs=1e-12)
    assert rows["test", "hadamard 2"]["rival"] == "klt 2" and rows["test", "klt 2"]["rival"] is None


def test_the_answer_is_the_least_kl_that_fits_and_what_is_far_is_no_tie(metrics):
    for row in metrics["ladder_answers"]:
        able = [
            one
            for one in plain_rows(metrics)
            if one["text"] == row["text"] and limit_of(one["bits_per_value"]) <= row["at_most"]
        ]
        assert row["tried"] == len(able)
        assert row["kl"]["value"] == min(one["kl"]["value"] for one in able)
        assert row["label"] not in row["ties"] and not row["ties"]  # planted half apart, and scattered by a tenth
    found = {(row["text"], row["at_most"]): row["label"] for row in metrics["ladder_answers"]}
    assert found["test", 2.0] == "klt 2" and found["test", 4.0] == "klt 4" and found["other", 9.5] == "fp8"


def test_a_codec_of_whole_caches_is_held_against_all_and_no_other_against_it(tmp_path):
    ladder = {"codecs": ["klt", "hadamard", "archive"], "whole_bits": [1.6, 2]}
    params = small_params(studies=["ladder"], ladder=ladder, **TWO_TEXTS)
    found = build(params, write_results(tmp_path, params).sources)
    rows = plain_rows(found)
    whole = {row["label"]: row for row in rows if row["whole"] and row["text"] == "test"}
    assert list(whole) == ["archive 1.6", "archive 2"] and {row["codec"] for row in whole.values()} == {"archive"}
    assert {row["rival"] for row in whole.values()} == {"klt 2"}
    assert not any((row["rival"] or "").startswith("archive") for row in rows)
    assert not {"archive"} & {row["codec"] for row in found["ladder"] if row["protocol"] == "in_forward"}
    serve, keep = ([row for row in found["ladder_answers"] if row["whole"] == one] for one in (False, True))
    assert not any(row["label"].startswith("archive") or "archive" in " ".join(row["ties"]) for row in serve)
    for row in keep:
        able = [one for one in rows if one["text"] == row["text"] and limit_of(one["bits_per_value"]) <= row["at_most"]]
        assert row["tried"] == len(able) and any(one["whole"] for one in able)
    words = chapter_context(found)
    assert words["whole"] == "`archive`" and len(words["keep"]) == len(by_limits(keep)) > 0
    state = {row["label"]: row for row in found["ladder_state"]}
    assert state["archive 2"]["resident_bytes"] > 0


def test_limits_with_the_same_rungs_are_told_together(metrics):
    answers = metrics["ladder_answers"]
    found = by_limits(answers)
    assert [one for limits, _ in found for one in limits] == sorted({row["at_most"] for row in answers})
    for limits, widest in found:
        at = {limit: [row for row in answers if row["at_most"] == limit] for limit in limits}
        assert widest == at[max(limits)] and all(picked(rows) == picked(widest) for rows in at.values())
    assert all(picked(one) != picked(following) for (_, one), (_, following) in itertools.pairwise(found))
    assert any(len(limits) > 1 for limits, _ in found)


def test_equal_codecs_are_ties(params, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.report.synthetic.ladder_kl", lambda effects, cell: effects.base)
    found = build(params, write_results(tmp_path, params).sources)
    last = [row for row in found["ladder_answers"] if row["at_most"] == 9.5]
    assert all(row["ties"] for row in last)
    assert any("not told from" in line for line in chapter_context(found)["use"])


def chapter_context(metrics: dict) -> dict:
    return context(metrics, Basis(0.95))["ladder"]


@given(st.floats(0.1, 16))
def test_a_limit_holds_its_rung_and_is_the_least_that_does(bits):
    limit = limit_of(bits)
    assert limit * (1 + SAME_BITS) >= bits - 1e-9 and (limit - 0.5) * (1 + SAME_BITS) < bits
    assert limit * 2 == int(limit * 2)


def test_offsets_make_up_the_mean(metrics):
    for row in metrics["ladder"]:
        tokens = sum(one["kl"]["n_tokens"] for one in row["by_offset"])
        mean = sum(one["kl"]["value"] * one["kl"]["n_tokens"] for one in row["by_offset"]) / tokens
        assert tokens == row["kl"]["n_tokens"] and mean == pytest.approx(row["kl"]["value"], rel=1e-9)
        ends = [(one["first"], one["last"]) for one in row["by_offset"]]
        assert ends == [(1, 7), (8, 16)]


def test_a_claim_names_rung_rival_and_text(metrics):
    told = {sentence(claim).partition(" lowers")[0].partition(" raises")[0]: claim for claim in claims(metrics)}
    starved = told["`hadamard 2` in place of `klt 2` (text of another domain)"]
    assert resolved(starved) and starved["effect"]["value"] > 0


def test_the_first_page_says_which_to_use(params, metrics, tmp_path):
    from kvlab_pipeline.report.verdict import judge

    findings.write(params, metrics, judge(params, metrics), tmp_path / "FINDINGS.md", tmp_path / "report.html")
    text = (tmp_path / "FINDINGS.md").read_text()
    first, _, rest = text.partition("## Which codec at how many bits")
    assert re.search(r"at up to 2( or 2.5)? bits per value, use \*\*klt 2\*\*: 2.00 bits \(", first)
    assert "hadamard 2" in rest and "None" not in text


def test_what_is_drawn_is_every_rung_on_each_text(metrics):
    table = ladder_table(metrics)
    assert len(table) == len(plain_rows(metrics))
    figures.described("ladder", table)
    assert [series_of(one) for one in ("klt 2", "fp8", "hadamard+center 4", "klt 2.5")] == [
        "klt",
        "fp8",
        "hadamard+center",
        "klt",
    ]
    assert np.isfinite(table["value"].to_numpy()).all()


@pytest.mark.parametrize(
    ("changes", "data"),
    [
        (TWO_TEXTS | {"ladder": {"texts": ["test", "other"]}}, ("ladder.texts", "'other'", "corpus.scored", "'test'")),
        ({"ladder": {"windows": 4, "fewer": 5}}, ("ladder.fewer is 5", "at most 4", "ladder.windows")),
    ],
)
def test_a_text_twice_and_more_windows_than_there_are_are_refused(changes, data):
    with refused(ParamsError, None, *data):
        small_params(**changes)


# ------------------------------------------------------------------------------- bits of a whole cache

STATES = st.builds(State, st.floats(0.5, 15.5), st.floats(0, 500), st.floats(0, 1e6))


@given(STATES, st.floats(600, 1e7))
def test_bits_of_a_cache_are_its_bytes_over_its_values(state, tokens):
    stored_bits = state.rate * (tokens - state.exact) + 16 * state.exact + state.artefact
    assert state.bits(tokens) == pytest.approx(stored_bits / tokens)
    assert state.bits(1e12) == pytest.approx(state.rate, rel=1e-5)


@given(STATES, STATES)
def test_at_the_break_even_both_store_the_same_and_after_it_the_one_stores_less(one, other):
    even = one.even(other)
    if even is None:
        assert one.rate >= other.rate and one.bits(1e15) >= other.bits(1e15) - 1e-9
    elif even > max(one.exact, other.exact):
        assert one.bits(even) == pytest.approx(other.bits(even), rel=1e-6)
        assert one.bits(2 * even + 1) <= other.bits(2 * even + 1) * (1 + 1e-9)


def test_what_was_planted_is_counted(params, metrics):
    rows = {row["label"]: row for row in metrics["ladder_state"]}
    half, layers = params.windows.eval / 2, params.model.n_layers
    klt, hadamard = rows["klt 2"], rows["hadamard 2"]
    assert klt["resident_bytes"] == 2 * klt["decoder_bytes"] == 1000 * layers and hadamard["resident_bytes"] == 0
    assert klt["exact_tokens"] == half
    for row, artefact in ((klt, 8 * 1000 / 128), (hadamard, 0.0)):
        bits = {at["tokens"]: at["bits_per_value"] for at in row["at"]}
        due = (row["rate"] * (8192 - half) + 16 * half + artefact) / 8192
        assert bits[8192] == pytest.approx(due)
    assert klt["even_with_bfloat16"] == pytest.approx(half + 8 * 1000 / 128 / (16 - klt["rate"]))
    assert klt["instead"] == "hadamard 4"  # the least of those with no more KL
    assert hadamard["instead"] is None


def test_tokens_that_a_recipe_keeps_are_not_paid_twice():
    recipe = SimpleNamespace(k=SimpleNamespace(sink=4, recent=60), v=SimpleNamespace(sink=4, recent=60))
    record = SimpleNamespace(coding=SimpleNamespace(bits_per_value=(2 * 448 + 16 * 64) / 512), recipe_id="r")
    measured = SimpleNamespace(cell=SimpleNamespace(recipe=recipe), record=record, context=512, eval=128)
    found = state_of(Rung(measured, "test", (0,)), SimpleNamespace(artefacts=(), values_per_token=1))
    assert (found.rate, found.exact, found.artefact) == (pytest.approx(2.0), 128, 0)


def test_the_page_tells_bits_of_whole_caches_and_the_gain(params, metrics):
    told = chapter_context(metrics)
    assert "in all at 8 k tokens" in told["use"][0] and "128 k tokens" in told["use"][0]
    assert "dB of K (1.0 bits per value)" in told["gain"] and "dB of V (0.50 bits per value)" in told["gain"]
    assert told["state"].count("\n") == 1 + len(metrics["ladder_state"])
    for row in metrics["ladder_gain"]:
        assert row["over_even"]["value"] == pytest.approx(GAIN[row["stream"]] + 0.01, abs=0.01)


def test_facts_of_something_else_are_refused(params, tmp_path):
    paths = write_results(tmp_path, params)
    facts = json.loads(paths.ladder.read_text())
    facts["provenance"]["model_hash"] = "6" * 16
    paths.ladder.write_text(json.dumps(facts))
    with refused(MixedIdentity, None, "model_hash"):
        build(params, paths.sources)
    facts["provenance"]["model_hash"] = "5" * 16
    paths.ladder.write_text(json.dumps(facts | {"artefacts": facts["artefacts"][1:]}))
    with refused(MissingResult, "missing-result.other-calibrations", "`kvlab step ladder`"):
        build(params, paths.sources)
    with refused(MissingResult, "missing-result.no-facts", "--ladder"):
        build(params, dataclasses.replace(paths.sources, ladder=None))


# ------------------------------------------------------------------- klt less a part, and inside the forward


def test_what_a_part_is_worth_is_found_beside_what_lacks_that_part_alone(metrics):
    rows = {(row["text"], row["label"]): row for row in metrics["ladder_ablation"]}
    due = {"klt 2 less escapes": 2, "klt 2 less tables": 3, "klt 2 less tables, transform": 7 / 3}
    due |= {"klt 2 less tables, metric": 1, "klt 2 less tables, allocation": 1}
    due |= {"klt 2 less budget": 1, "klt 2 less tables, joint": 1}
    assert {label for _, label in rows} == set(due)
    for label, times in due.items():  # exact over both texts together, which have as many windows
        found = [row for (_, name), row in rows.items() if name == label]
        kl = sum(row["kl"]["value"] for row in found)
        assert kl / sum(row["kl"]["value"] - row["difference"]["value"] for row in found) == pytest.approx(times)
        assert {row["against"] for row in found} == {"klt 2" if "," not in label else "klt 2 less tables"}
    assert "less tables, transform" in chapter_context(metrics)["ablations"]


def test_a_recipe_takes_out_the_part_that_its_label_names(params):
    whole = KltStream(bits=2, budget="cache")
    for one in ablations(params):
        less = {name for name, value in one.recipe.k if value != getattr(whole, name)}
        part = one.label.split(" less ")[1].rpartition(", ")[2]
        own = {"escapes": "escape"}.get(part, part if part in ("budget", "tables", "allocation") else "transform")
        assert less == {own, "tables"} if own in ("allocation", "transform") else less == {own}


def test_codecs_inside_the_forward_stand_beside_themselves_over_the_cache(params, metrics):
    lines = chapter_context(metrics)["forward"].splitlines()[2:]
    assert len(lines) == 2 * len(params.ladder.in_forward)
    for row in metrics["ladder"]:
        if row["protocol"] == "in_forward":
            assert row["rival"] in (None, "klt 2", "hadamard 2") and "–" not in lines[0]


def test_what_is_not_compared_is_neither_taken_apart_nor_run_inside():
    """So a shorter list of codecs is one edit."""
    fewer = small_params(ladder={"codecs": ["hadamard"], "ablated": ["escapes"], "growth": [0.5]}).ladder
    assert (fewer.ablated, fewer.growth, fewer.in_forward) == ((), (), ("hadamard",))
    assert small_params(ladder={"in_forward": ["klt", "d4"]}).ladder.in_forward == ("klt",)


# ------------------------------------------------------------------------------------------ coding gain


def test_the_gain_of_a_known_spectrum_is_its_arithmetic_over_its_geometric_mean():
    spectrum = torch.tensor([[16.0, 4.0, 1.0, 0.25]], dtype=torch.float64)
    even, plain = gains(spectrum, spectrum, torch.tensor([5.3125 * 10], dtype=torch.float64))[:, 0].tolist()
    assert even == pytest.approx(10 * np.log10(5.3125 / 2)) and plain == pytest.approx(even + 10)


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=8), st.lists(st.floats(1e-3, 1e3), min_size=8, max_size=8))
def test_bits_allocated_by_other_variances_gain_no_more(found, allocated):
    found = torch.tensor([found], dtype=torch.float64)
    other = torch.tensor([allocated[: found.shape[1]]], dtype=torch.float64)
    best, worse = (gains(one, found, found.mean(1))[0].item() for one in (found, other))
    assert best >= -1e-9 and worse <= best + 1e-9
    assert gains(7 * other, found, found.mean(1))[0].item() == pytest.approx(worse)


def test_white_noise_has_nothing_to_gain_and_a_planted_transform_all_of_it():
    rng = torch.Generator().manual_seed(0)
    scale = torch.tensor([8.0, 2.0, 0.5, 0.125], dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=rng, dtype=torch.float64)).Q
    rows = (torch.randn(1, 1, 4096, 4, generator=rng, dtype=torch.float64) * scale) @ turn
    due = 10 * np.log10(scale.square().mean().item() / scale.square().log().mean().exp().item())
    fitted = fit(rows, None)
    fresh = (torch.randn(1, 4096, 4, generator=rng, dtype=torch.float64) * scale) @ turn
    assert of_rows(fitted, fresh.float())[0].item() == pytest.approx(due, abs=0.3)
    white = fit(torch.randn(1, 1, 4096, 4, generator=rng), None)
    assert of_rows(white, torch.randn(1, 4096, 4, generator=rng))[0].item() == pytest.approx(0, abs=0.1)


def test_a_text_of_one_window_is_left_out(tmp_path):
    params = small_params(studies=["ladder"], ladder={"windows": 3, "fewer": 2}, **TWO_TEXTS)
    found = build(params, write_results(tmp_path, params).sources)
    assert {row["text"] for row in found["ladder"]} == {row["text"] for row in found["ladder_gain"]} == {"other"}
    assert found["ladder_ablation"] == [] and chapter_context(found)["ablations"] is None
