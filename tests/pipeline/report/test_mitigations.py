"""Mitigations: planted gains are found, arms on the curve are not told from it, unequal bytes are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from kvlab.core.errors import Fault, MissingResult, MixedIdentity, StaleResult
from kvlab.output import format as fmt
from kvlab.stats.bootstrap import Bootstrap
from kvlab_pipeline.rendering.templates import render
from kvlab_pipeline.report import claims as said
from kvlab_pipeline.studies.mitigations import chapter as tables
from kvlab_pipeline.studies.mitigations.chapter import claims as claims_of
from kvlab_pipeline.studies.mitigations.chapter import mitigations, mitigations_table
from kvlab_pipeline.studies.mitigations.numbers import KLT, STUDIED, mitigation_entries
from pipeline.report.planted_identity import provenance
from pipeline.report.planted_mitigations import (
    CHOICE,
    ENGINES,
    FLOOR,
    PROTOCOLS,
    Planted,
    on_curve,
    planted_choice,
    planted_params,
    planted_results,
)
from refusals import refused

BOOT = Bootstrap(600, 0.95, 0)
PLANTED = Planted(gain={"moved": 0.7, "hot": 1.0, "extended": 1.5, "greedy": 1.4, "klt boundary": 2.0, "klt hot": 0.9})


def mitigation_claims(params, results, boot, choice):
    return claims_of(mitigation_entries(params, results, boot, choice), len(params.codec.boundary_layers))


@pytest.fixture(scope="module")
def params():
    return planted_params()


@pytest.fixture(scope="module")
def entries(params):
    return mitigation_entries(params, planted_results(params, PLANTED), BOOT, planted_choice(params))


def one(rows, **wanted) -> dict:
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    assert len(found) == 1
    return found[0]


def compared(params, planted, choice=CHOICE, engine="hf", protocol="snapshot") -> dict[str, dict]:
    made = mitigation_entries(params, planted_results(params, planted, choice), BOOT, planted_choice(params, choice))
    return {row["arm"]: row for row in made["comparisons"] if (row["engine"], row["protocol"]) == (engine, protocol)}


# ---------------------------------------------------------------------------------- what is said


def test_every_arm_is_there_once_with_its_bytes_and_layers(entries):
    json.dumps(entries, allow_nan=False)
    assert len(entries["arms"]) == len(ENGINES) * len(PROTOCOLS) * len(PLANTED.bits)
    for row in entries["arms"]:
        assert row["bits_per_value"] == pytest.approx(PLANTED.bits[row["arm"]])
        assert row["kl"]["value"] == pytest.approx(PLANTED.kl(row["arm"]))
        assert row["kl_net"]["value"] == pytest.approx(PLANTED.kl(row["arm"]) - FLOOR)
        assert row["delta_nll"]["value"] == pytest.approx(0.8 * PLANTED.kl(row["arm"]))
        assert tuple(row["layers"]) == getattr(CHOICE, row["arm"].replace(" ", "_"), ())
    assert len(entries["comparisons"]) == len(ENGINES) * len(PROTOCOLS) * len((*STUDIED, *KLT))


@pytest.mark.parametrize("arm, gain", [("moved", 0.7), ("greedy", 1.4), ("klt boundary", 2.0), ("klt hot", 0.9)])
def test_a_planted_gain_or_loss_is_found(entries, arm, gain):
    for engine in ENGINES:
        for protocol in PROTOCOLS:
            row = one(entries["comparisons"], arm=arm, engine=engine, protocol=protocol)
            assert row["beyond"] is None and not row["same"]
            assert row["ratio"]["value"] == pytest.approx(
                gain, rel=1e-3
            )  # bytes are whole, so the curve moves a little
            for end in ("value", "low", "high"):
                assert row["log_ratio"][end] == pytest.approx(np.log(row["ratio"][end]))
            uniform = on_curve(PLANTED.bits[arm])
            assert row["difference"]["value"] == pytest.approx((gain - 1) * uniform, rel=1e-2)
            assert (row["ratio"]["high"] < 1) == (gain < 1) and (row["ratio"]["low"] > 1) == (gain > 1)
            assert tables.verdict(row) == ("better" if gain < 1 else "worse")


def test_an_arm_on_the_curve_is_not_told_from_it(params):
    """Cells of which each scatters on its own: nearly all 95 % intervals hold the ratio 1 that was planted."""
    made = mitigation_entries(
        params, planted_results(params, Planted(jitter=0.4, exact=False)), BOOT, planted_choice(params)
    )
    rows = [row for row in made["comparisons"] if row["beyond"] is None]
    inside = [row["ratio"]["low"] <= 1 <= row["ratio"]["high"] for row in rows]
    assert len(rows) == len(ENGINES) * len(PROTOCOLS) * 5 and np.mean(inside) > 0.85
    assert len({row["ratio"]["value"] for row in rows}) == len(rows)
    assert inside == ["not resolved" in tables.verdict(row) for row in rows]


def test_the_curve_is_read_linearly_in_the_logarithm(params):
    rows = compared(params, Planted(bits=Planted().bits | {"hot": 7.6}))
    assert rows["hot"]["against"] == "uniform curve"
    bent = Planted(bits=Planted().bits | {"hot": 7.6}, gain={"uniform 3/2": 2.0, "hot": 1.0})
    # half way between a point that is doubled and one that is not
    assert compared(params, bent)["hot"]["ratio"]["value"] == pytest.approx(2**-0.5, rel=1e-3)
    assert rows["hot"]["ratio"]["value"] == pytest.approx(1, rel=1e-3)


def test_pairing_makes_the_interval_narrow(params):
    """What windows share cancels: the ratio is known much better than either KL."""
    made = mitigation_entries(params, planted_results(params, PLANTED), BOOT, planted_choice(params))
    row = one(made["comparisons"], arm="moved", engine="hf", protocol="snapshot")
    arm = one(made["arms"], arm="moved", engine="hf", protocol="snapshot")
    relative = fmt.half_width(arm["kl"]) / arm["kl"]["value"]
    assert fmt.half_width(row["log_ratio"]) < 0.3 * relative


def test_beyond_the_curve_the_last_point_is_the_rival_and_that_is_said(params, entries):
    row = one(entries["comparisons"], arm="extended", engine="hf", protocol="snapshot")
    assert (row["beyond"], row["against"]) == ("above", "uniform 8/8")
    assert row["against_bits_per_value"] == pytest.approx(9.2) and row["bits_per_value"] == pytest.approx(9.5)
    assert row["ratio"]["value"] == pytest.approx(1.5 * on_curve(9.5) / on_curve(9.2))
    assert "takes more bytes" in tables.verdict(row) and "at 9.200 bits per value" in tables.comparisons([row])
    low = compared(params, Planted(bits=Planted().bits | {"greedy": 7.0}))["greedy"]
    assert (low["beyond"], low["against"]) == ("below", "uniform 3/2")
    assert "takes fewer bytes" in tables.verdict(low)


def test_an_arm_that_is_the_studied_recipe_again_is_one_and_the_same(params):
    again = CHOICE.model_copy(update={"moved": params.codec.boundary_layers, "klt_hot": ()})
    rows = compared(params, PLANTED, again)
    for arm in ("moved", "klt hot"):
        assert rows[arm]["same"] and rows[arm]["ratio"]["value"] == 1 and rows[arm]["difference"]["value"] == 0
        assert tables.verdict(rows[arm]) == "one and the same cell"
    results = planted_results(params, PLANTED, again)
    found = mitigation_claims(params, results, BOOT, planted_choice(params, again))
    assert not any("another set of layers" in claim["subject"] for claim in found)


def test_the_choice_is_held_against_the_test_split(entries, params):
    for row in entries["generalises"]:
        uniform = "klt uniform" if row["arm"] in KLT else "uniform 3/2"
        assert row["calib"] == pytest.approx(0.4)
        assert row["test"]["value"] == pytest.approx(1 - PLANTED.kl(row["arm"]) / PLANTED.kl(uniform))
        assert tuple(row["layers"]) == getattr(CHOICE, row["arm"].replace(" ", "_"))
    elsewhere = params.model_copy(
        update={"mitigations": params.mitigations.model_copy(update={"protocols": ("in_forward",)})}
    )
    made = mitigation_entries(elsewhere, planted_results(elsewhere, PLANTED), BOOT, planted_choice(params))
    assert {row["test"] for row in made["generalises"]} == {None}


def test_claims_name_their_arm_its_layers_and_what_it_is_held_against(params):
    found = mitigation_claims(params, planted_results(params, PLANTED), BOOT, planted_choice(params))
    assert len(found) == len(ENGINES) * len(PROTOCOLS) * len((*STUDIED, *KLT))
    assert {claim["about"] for claim in found} == {"mitigations"} and {claim["null"] for claim in found} == {1.0}
    words = [said.sentence(claim) for claim in found]
    moved = next(text for text in words if "another set" in text)
    assert moved.startswith(
        "Leaving another set of layers uncoded, as many as `params.yaml` names: layers 2 and 3 (`hf`,"
    )
    assert "(`hf`, `in_forward`), against uniform spending of as many bytes, lowers KL to 0.7" in moved
    beyond = next(text for text in words if text.startswith("Leaving more layers uncoded"))
    assert "`uniform 8/8`, which takes fewer bytes," in beyond
    hot = next(text for text in words if text.startswith("One bit more for K on layer 3"))
    assert "not resolved" in hot


@pytest.mark.full
@pytest.mark.parametrize("layers, many", [((2,), "fewer than"), ((2, 3), "as many as"), ((1, 2, 3), "more than")])
def test_moved_boundary_layers_are_counted_before_they_are_called_as_many(params, layers, many):
    """A greedy search may end before it found as many layers as params.yaml names."""
    assert len(params.codec.boundary_layers) == 2
    short = CHOICE.model_copy(update={"moved": layers})
    found = mitigation_claims(params, planted_results(params, PLANTED, short), BOOT, planted_choice(params, short))
    subjects = [claim["subject"] for claim in found if "another set" in claim["subject"]]
    assert subjects and all(f"uncoded, {many} `params.yaml` names: layer" in subject for subject in subjects)


def test_searches_that_find_the_same_layers_are_claimed_once(params):
    same = CHOICE.model_copy(update={"extended": CHOICE.greedy})
    found = mitigation_claims(params, planted_results(params, PLANTED, same), BOOT, planted_choice(params, same))
    assert len(found) == len(ENGINES) * len(PROTOCOLS) * (len((*STUDIED, *KLT)) - 1)


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.full
def test_unequal_bytes_of_klt_are_refused(params):
    for arm in KLT:
        fine = Planted(bits=Planted().bits | {arm: 4.0 * 1.0049})
        assert compared(params, fine)[arm]["against"] == "klt uniform"
        for factor in (1.0051, 0.9949):
            with refused(Fault, "fault.unequal-bytes"):
                compared(params, Planted(bits=Planted().bits | {arm: 4.0 * factor}))


@pytest.mark.parametrize(
    "changes", [{"model_hash": "6" * 16}, {"corpus_hash": "d" * 16}, {"calibration": {"hf": "b" * 16}}]
)
def test_a_choice_of_another_run_is_refused(params, changes):
    results = planted_results(params, PLANTED)
    name = next(iter(changes))
    for made in (mitigation_entries, mitigation_claims):
        with refused(MixedIdentity, None, name):
            made(params, results, BOOT, planted_choice(params, provenance=provenance(**changes)))


def test_calibrations_that_only_the_results_read_do_not_matter(params):
    results = planted_results(params, PLANTED, calibration={"hf": "a" * 16, "vllm": "b" * 16})
    assert mitigation_entries(params, results, BOOT, planted_choice(params))
    with refused(MixedIdentity, None, "calibration"):
        other = provenance(calibration={"hf": "a" * 16, "vllm": "e" * 16})
        mitigation_entries(params, results, BOOT, planted_choice(params, provenance=other))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"engine": "vllm"}, "engine vllm"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"windows": 3}, "windows 3"),
        ({"budget": 11.5}, "budget 11.5"),
        ({"search_id": "0" * 12}, "000000000000"),
    ],
)
def test_a_choice_of_other_parameters_is_refused(params, changes, named):
    with refused(StaleResult, "stale.other-choice", named, "`kvlab step choose`"):
        choice = planted_choice(params, **changes)
        mitigation_entries(params, planted_results(params, PLANTED), BOOT, choice)


def test_an_arm_that_was_not_measured_is_named(params):
    results = planted_results(params, PLANTED)
    short = replace(results, cells=tuple(m for m in results.cells if m.cell.label != "hot"))
    with refused(MissingResult, "missing-result.cell", "'hot'"):
        mitigation_entries(params, short, BOOT, planted_choice(params))
    bare = replace(results, cells=tuple(m for m in results.cells if m.role != "identity"))
    with refused(MissingResult, "missing-result.identity"):
        mitigation_entries(params, bare, BOOT, planted_choice(params))


# ------------------------------------------------------------------------------------ the section


def page(made: dict | None, claims: dict | None = None) -> str:
    context = tables.mitigations_context({"mitigations": made}, lambda found: f"*{len(found)} estimates.*")
    return render("mitigations.md.j2", mitigations=context, claims=claims or {}, figures={"mitigations": None})


def test_the_section_says_where_the_choice_was_made(entries):
    text = page(entries, {"mitigations": ["Something lowers KL."]})
    assert "chosen on the calibration split alone: `hf`, bfloat16, `snapshot`" in text
    assert "flatters it" in text and "- Something lowers KL." in text
    assert "held against the last point" in text
    for engine in ENGINES:
        assert f"`{engine}`, `in_forward`:" in text
    without = [row | {"beyond": None} for row in entries["comparisons"]]
    assert "held against the last point" not in page(entries | {"comparisons": without})


def test_the_path_of_the_search_is_a_table(entries):
    assert entries["choice"]["budget"] == 10.0 and "more than 10 bits per value" in page(entries)
    lines = tables.path([step for step in entries["choice"]["searches"] if step["search"] == "greedy"]).splitlines()
    steps = [line.split("|")[1].strip() for line in lines[2:]]
    assert steps == ["none yet", "layer 0", "layer 2", "layer 3"]
    assert "0.0500" in lines[2] and "0.0300" in lines[-1]


def test_a_study_that_was_not_run_is_named_as_such():
    assert "did not measure" in page(None)


# --------------------------------------------------------------------------------------- figures


def test_every_arm_is_drawn_once(entries, tmp_path):
    table = mitigations_table({"mitigations": entries})
    assert table.height == len(entries["arms"])
    at = {mark.row: (mark.at, mark.value) for mark in mitigations(table).marks}
    assert [at[row] for row in range(table.height)] == table.select("bits_per_value", "value").rows()


def test_nothing_measured_is_nothing_drawn():
    for metrics in ({}, {"mitigations": None}, {"mitigations": {"arms": []}}):
        assert mitigations_table(metrics) is None
