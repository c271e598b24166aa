"""What has to be told of a model's weights stands wherever numbers of that model do."""

from __future__ import annotations

from kvlab_pipeline.report import comparison, findings, readme
from kvlab_pipeline.report.metrics import disclosure
from kvlab_pipeline.report.verdict import judge
from kvlab_pipeline.studies.settings import Settings
from pipeline.report import test_comparison as compared
from pipeline.report.example_metrics import build, verdict
from pipeline.report.test_findings import some_params

SAID = "The weights are 4-bit ones, dequantised."
params, small = compared.params, compared.small


def told(metrics: dict) -> dict:
    """The same metrics of a model of which something has to be told."""
    return metrics | {"identity": metrics["identity"] | {"disclosure": SAID}}


def test_the_model_that_leads_has_one():
    lead = {"path": "models/smollm2-135m", "slug": "lead", "n_layers": 30}
    assert "Q4_1" in disclosure(Settings.complete({"model": lead}))
    assert disclosure(Settings.complete({"model": lead | {"path": "models/reference", "n_layers": 6}})) is None


def test_findings_open_with_it(tmp_path):
    metrics = told(build())
    findings.write(some_params(), metrics, verdict(metrics), tmp_path / "FINDINGS.md", tmp_path / "report.html")
    text = (tmp_path / "FINDINGS.md").read_text()
    assert SAID in text.partition("## What to use")[2][:200]
    assert SAID in (tmp_path / "report.html").read_text()


def test_the_readme_says_it_under_its_headline(tmp_path):
    metrics, path = told(build()), tmp_path / "README.md"
    path.write_text(f"{readme.BEGIN}\n{readme.END}\n")
    readme.update(path, metrics, verdict(metrics))
    assert SAID in path.read_text()


def test_a_comparison_says_it_of_every_model_that_it_holds(small, params, tmp_path):
    found = comparison.build([small, told(compared.named(small, "large"))])
    findings.write(params, small, judge(params, small), tmp_path / "FINDINGS.md", comparison=found)
    section = (tmp_path / "FINDINGS.md").read_text().partition("## Across models")[2].partition("\n## ")[0]
    assert f"`large`: {SAID}" in section
