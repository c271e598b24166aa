import json

import pytest

from kvlab.core.errors import Fault
from refusals import refused
from validation.planted import coverage, noise, relabelled
from validation.planted.run import planted

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@pytest.fixture
def little(monkeypatch, tiny_params, tiny_windows, hf_engine):
    """`planted` on the tiny model and one engine, with few synthetic tables of one distribution."""
    one = tiny_params.model_copy(update={"engines": ("hf",)})
    monkeypatch.setattr(coverage, "DISTRIBUTIONS", coverage.DISTRIBUTIONS[1:2])
    monkeypatch.setattr(coverage, "MANY", 10)
    monkeypatch.setattr(coverage, "FEW", (4,))
    monkeypatch.setattr(coverage, "RESAMPLES", 200)
    monkeypatch.setattr(coverage, "BAND", (0.7, 1.0))
    return lambda out: planted(one, tiny_windows, out, repeats=20)


def test_report_and_values_are_written_and_the_same_twice(little, tmp_path):
    little(tmp_path / "a"), little(tmp_path / "b")
    data = json.loads((tmp_path / "a" / "planted.json").read_text())
    assert data["holds"] and len(data["cases"]) == 5
    assert {one["factor"] for one in data["controls"]} == {"dtype", "protocol"}
    *ways, everything = data["paths"]
    assert len(ways) == 6 and everything["values"] == sum(way["values"] for way in ways)
    values = [value for case in data["cases"] for value in case["values"]]
    assert all(v["estimate"]["low"] <= v["planted"] <= v["estimate"]["high"] for v in values)
    assert len(data["coverage"]["entries"]) == 2 * len(coverage.statistics())
    text = (tmp_path / "a" / "REPORT.md").read_text()
    for case in data["cases"]:
        assert case["name"] in text.lower()
    assert "**no**" not in text and "{{" not in text
    for name in ("planted.json", "REPORT.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_wrong_planted_value_fails_and_is_shown(little, tmp_path, monkeypatch):
    trace = noise.trace
    monkeypatch.setattr(noise, "trace", lambda *given: 2 * trace(*given))
    with refused(Fault, "fault.not-recovered", "weighted error") as error:
        little(tmp_path)
    assert error.value.exit_code == 1
    assert "**no**" in (tmp_path / "REPORT.md").read_text()
    assert not json.loads((tmp_path / "planted.json").read_text())["holds"]


def test_exchanged_labels_that_nobody_notices_fail_and_are_shown(little, tmp_path, monkeypatch):
    monkeypatch.setattr(relabelled, "relabelled", lambda cell, factor, levels: cell)
    with refused(Fault, "fault.not-recovered", "labels of 'dtype'"):
        little(tmp_path)
    assert "**read**" in (tmp_path / "REPORT.md").read_text()


def test_coverage_out_of_the_band_fails_and_is_shown(little, tmp_path, monkeypatch):
    monkeypatch.setattr(coverage, "BAND", (0.999, 1.0))
    with refused(Fault, "fault.not-recovered", "mean KL ("):
        little(tmp_path)
    assert "were not recovered" in (tmp_path / "REPORT.md").read_text()
