"""TRUST.md: corruptions listed, false alarms at most at their rate, planted losses drawn, own baselines tried."""

from __future__ import annotations

import csv
import re

import polars as pl
import pytest

from gate.planted_records import BASE, GOOD, NEEDLES, WINDOWS, plant, read_back, record, table
from gate.test_page import CONTEXT, CURRENT, REGISTRY, objects, section, tables
from kvlab.gate import registry
from kvlab.gate.cases import Context
from kvlab_pipeline.studies.mechanisms.records import write_mechanisms
from validation.gate import corruptions, page
from validation.gate.corruptions import MUTATIONS
from validation.gate.power import CHURN, LOSSES, NOMINAL, SIZES, WORDS
from validation.gate.trust import losses, trust

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return read_back(tmp_path_factory.mktemp("rows"), objects())


@pytest.fixture(scope="module")
def judged_once(lines):
    """What the page and its numbers say of the corruptions, without judging them anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corruptions, "table", lambda: lines)
        yield


@pytest.fixture(scope="module")
def written(judged_once, rows, tmp_path_factory):
    """The folder of the page with its curve beside it."""
    folder = tmp_path_factory.mktemp("gate")
    files = plant(folder)
    page.write(rows, CONTEXT, folder / "TRUST.md", [files["hf"], files["vllm"]])
    return folder


@pytest.fixture(scope="module")
def text(written):
    return (written / "TRUST.md").read_text()


@pytest.fixture(scope="module")
def numbers(judged_once):
    return trust(REGISTRY, [(0.5, 320), (0.1, 150)])


def test_every_corruption_is_listed_and_detected(text, numbers):
    kinds, listed = tables(section(text, "Corruptions"))
    assert len(listed) - 1 == len(MUTATIONS) == len(numbers["mutations"]) >= 40
    assert all(line[2] == "yes" for line in listed[1:])
    assert {line[1] for line in listed[1:]} == {mutation.code for mutation in MUTATIONS}
    assert sum(int(line[1]) for line in kinds[1:]) == len(MUTATIONS)
    seen = [line for line in listed[1:] if line[3] == "yes"]
    assert sum(int(line[3]) for line in kinds[1:]) == len(seen) < len(MUTATIONS) / 2
    assert sum(int(line[4]) for line in kinds[1:]) == sum(line[4] == "pass" for line in seen)
    assert all(line[4] == "pass" for line in listed[1:] if line[3] == "no")
    assert f"{len(seen)} of the corruptions change something" in text


def test_a_corruption_that_is_missed_would_be_told(monkeypatch, lines, rows, tmp_path):
    made = [lines[0], lines[1] | {"detected": False}, lines[2]]
    monkeypatch.setattr(corruptions, "table", lambda: made)
    page.write(rows, CONTEXT, tmp_path / "TRUST.md")
    told = (tmp_path / "TRUST.md").read_text()
    assert "2 of 3 corruptions are detected" in told and "| no |" in told


def test_a_baseline_that_was_scored_twice_is_judged_anew(rows, tmp_path):
    changed = table(BASE, GOOD)
    second = (pl.col("label") == "baseline") & (pl.col("metric") == "needle_recall") & (pl.col("item") < 8)
    changed = changed.with_columns(variant=pl.when(second).then(0.0).otherwise(pl.col("variant")))
    write_mechanisms(tmp_path / "hf", record("hf", (BASE, GOOD)), changed)
    page.write(rows, CONTEXT, tmp_path / "TRUST.md", [tmp_path / "hf.json"])
    (again,) = tables(section((tmp_path / "TRUST.md").read_text(), "The engine scored twice"))
    said = {line[1]: line[2:] for line in again[1:]}
    assert said["kl"] == [f"0 of {WINDOWS}", "200", "0", "0"] and said["needle_recall"][0] == f"8 of {NEEDLES}"
    assert sum(map(int, said["needle_recall"][1:])) == 200 and int(said["needle_recall"][2]) > 0
    stale = Context(REGISTRY, {"reference": CURRENT["reference"] | {"code": "newer"}})
    page.write(rows, stale, tmp_path / "TRUST.md", [tmp_path / "hf.json"])
    assert "The engine scored twice" not in (tmp_path / "TRUST.md").read_text()


def test_the_baseline_against_itself_fails_at_most_at_the_nominal_rate(numbers, text):
    alarms = numbers["power"]["alarms"]
    registered = [alarm for alarm in alarms if alarm["allowed"] == "as registered"]
    tried = [(alarm["base_rate"], alarm["n_items"]) for alarm in registered]
    assert tried == [*((0.9, size) for size in sorted({*SIZES, 150, 320})), (0.5, 320)]  # 0.1 is below the floor
    assert all(alarm["resamples"] >= 200 and alarm["rate"] <= NOMINAL for alarm in registered)
    strictest = [alarm for alarm in alarms if alarm not in registered]
    assert len(strictest) == len(SIZES) and all(alarm["low"] <= NOMINAL for alarm in strictest)
    assert all(sum(alarm[word] for word in WORDS) == alarm["resamples"] for alarm in alarms)
    assert "false alarm, which may be at most 2.5 % of the repeats" in text


def test_planted_losses_have_their_curve(numbers, written):
    curve = numbers["power"]["curve"]
    assert {row["loss"] for row in curve} == set(LOSSES) >= {0.02, 0.05, 0.1}
    with open(written / "detection.csv") as file:
        drawn = list(csv.DictReader(file))
    assert {(float(row["loss"]), int(row["n_items"])) for row in drawn} >= {(x, n) for x in LOSSES for n in SIZES}
    assert (written / "detection.svg").read_text().startswith("<?xml")
    large = [row for row in curve if row["loss"] >= 0.05]
    assert all(row["within"] <= NOMINAL for row in large)
    assert [row["word"] for row in numbers["power"]["needed"]] == ["within", "within", "beyond"]


def test_the_sizes_hold_the_needles_of_this_run(written):
    with open(written / "detection.csv") as file:
        assert NEEDLES in {int(row["n_items"]) for row in csv.DictReader(file)}


def test_the_curve_is_drawn_at_the_baselines_of_this_run_too(numbers):
    own = [row for row in numbers["power"]["curve"] if row["base_rate"] == 0.5]
    assert [(row["loss"], row["n_items"], row["churn"]) for row in own] == [(loss, 320, CHURN) for loss in LOSSES]
    assert 0.1 not in {row["base_rate"] for row in numbers["power"]["curve"]}
    perfect = [row for row in losses(REGISTRY.eval("needle").metrics[0], [(1.0, 200)])["curve"] if row["churn"] == 0]
    assert {row["n_items"] for row in perfect} == {200} and perfect[0]["within"] == 1


def test_a_registry_without_that_eval_has_no_curve(rows, tmp_path):
    evals = {name: entry for name, entry in REGISTRY.evals.items() if name != "needle"}
    page.write(rows, Context(registry.Registry(REGISTRY.mechanisms, evals)), tmp_path / "TRUST.md")
    assert "Planted losses" not in (tmp_path / "TRUST.md").read_text()
    assert (tmp_path / "detection.csv").read_text().startswith("base_rate,")
    assert "<svg" in (tmp_path / "detection.svg").read_text()


def test_the_template_types_no_numeral_and_its_links_lead_to_what_lies_beside_it(text):
    prose = re.sub(r"{{.*?}}|{%.*?%}|{#.*?#}", "", page.TEMPLATE.read_text(), flags=re.S)
    assert not re.findall(r"\d", prose)
    assert re.findall(r"\]\(([^)]+)\)", text) == ["GATE.md", "detection.svg"]
