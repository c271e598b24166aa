"""A run of some studies on two texts: what is not asked for is not there, and each text has its gap."""

from __future__ import annotations

import pytest

from kvlab_pipeline.report import findings
from kvlab_pipeline.report.metrics import build
from kvlab_pipeline.report.schema import OPTIONAL
from kvlab_pipeline.report.verdict import judge
from kvlab_pipeline.studies.register import chapters
from pipeline.report.synthetic import Effects, small_params, write_results


@pytest.fixture(scope="module")
def params():
    return small_params(
        studies=["layers"],
        corpus={"scored": ["other", "test"]},
        layers={"engines": ["hf"], "left_out": False, "protocols": ["snapshot"]},
        stats={"resamples": 400},
    )


@pytest.fixture(scope="module")
def metrics(params, tmp_path_factory):
    return build(params, write_results(tmp_path_factory.mktemp("asked"), params, Effects()).sources)


def test_what_is_not_asked_for_is_null_and_the_rest_is_whole(params, metrics):
    absent = {part for study in OPTIONAL - {"layers"} for part in chapters()[study].parts}
    assert {name for name in absent if metrics[name] is not None} == set()
    assert metrics["gap"]["measures"] and metrics["cells"] and metrics["baseline"]
    assert {(row["engine"], row["protocol"], row["kind"]) for row in metrics["layers"]} == {("hf", "snapshot", "only")}
    assert all(row["left_out_sum"] is None for row in metrics["additivity"])


def test_the_shares_on_each_text_add_up_and_their_windows_are_all(params, metrics):
    assert [entry["text"] for entry in metrics["gap_by_text"]] == ["other", "test"]
    for entry in metrics["gap_by_text"]:
        total = sum(part["share"]["value"] for part in entry["parts"])
        assert total == pytest.approx(entry["gap"]["value"], abs=1e-12)
        assert entry["gap"]["value"] == pytest.approx(entry["high"]["value"] - entry["low"]["value"], abs=1e-12)
    assert sum(entry["gap"]["n_windows"] for entry in metrics["gap_by_text"]) == params.windows.test
    mean = sum(entry["gap"]["value"] * entry["gap"]["n_windows"] for entry in metrics["gap_by_text"])
    assert mean / params.windows.test == pytest.approx(metrics["gap"]["measures"]["kl"]["gap"]["value"])


def test_its_page_can_be_read(params, metrics, tmp_path):
    findings.write(params, metrics, judge(params, metrics), tmp_path / "FINDINGS.md", tmp_path / "report.html")
    text = (tmp_path / "FINDINGS.md").read_text()
    assert "### On each text alone" in text and f"| `{params.corpus.other}` | another domain" in text
    assert "None" not in text
