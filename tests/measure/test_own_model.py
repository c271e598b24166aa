"""Somebody's own model directory and own texts: from `kvlab init` to FINDINGS.md, for each architecture."""

from __future__ import annotations

import json

import pytest
import yaml

import tiny
from kvlab.cli import main as cli
from kvlab.core.paramfile import overlay, read_yaml
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.report import findings
from kvlab_pipeline.report.metrics import build
from kvlab_pipeline.report.summary import summary
from kvlab_pipeline.report.verdict import judge
from kvlab_pipeline.studies.chapter import Sources
from kvlab_pipeline.studies.settings import read_params

pytestmark = pytest.mark.engine

# What each architecture has of its own: no bias (llama), biases and a head of its own (qwen2), norms of Q and K with a
# head_dim that is not hidden_size / heads (qwen3); tied embeddings everywhere else.
KINDS = {"llama": {}, "qwen2": {"tie_word_embeddings": False}, "qwen3": {"head_dim": 64}}
SMALL = {
    "windows": {"context": 64, "eval": 32, "calib": 4},
    "studies": [],
    "calibration": {"engines": ["hf"]},
    "codec": {"block_size": 64, "n_centres": 4},
    "gap": {"dtypes": ["float32"]},
    "baseline": {"dtypes": ["float32"], "hf_attention": ["sdpa"]},
    "stats": {"resamples": 300},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.full if kind == "qwen3" else pytest.mark.nightly) for kind in sorted(KINDS)
    ],
)
def mine(request, tmp_path_factory):
    """A folder with a model of one architecture and two texts."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny.write_model(folder / "model", request.param, **KINDS[request.param])
    tiny.write_text(folder / "mine.txt", seed=3)
    tiny.write_text(folder / "other.txt", seed=4)
    return folder


def verb(*words) -> None:
    """A line of the command line; a refusal fails the test with what it says."""
    cli.main([str(word) for word in words])


def test_its_own_texts_and_model_lead_to_findings(mine, monkeypatch):
    """The verbs that the rules call, in one process."""
    monkeypatch.chdir(mine)
    verb("init", "--model", "model", "--engines", "hf", "--windows", 4, "--text", "mine.txt", "--out", "params.yaml")
    data = read_yaml(mine / "params.yaml")
    data["corpus"] |= {"other": "other.txt", "scored": ["test", "other"]}  # the one edit, and both texts are scored
    (mine / "params.yaml").write_text(yaml.safe_dump(overlay(data, SMALL)))
    params = read_params(mine / "params.yaml", None)
    given = ("--params", "params.yaml", "--windows", "windows.safetensors")
    verb("step", "corpus", "--params", "params.yaml", "--out", "windows.safetensors")
    verb("step", "capture", *given, "--engine", "hf", "--out", "hf.safetensors")
    captured = ("--params", "params.yaml", "--capture", "hf.safetensors")
    verb("step", "sigma", *captured, "--out", "sigma/hf.safetensors")
    sigma = ("--sigma", "sigma/hf.safetensors")
    verb("step", "codebooks", *captured, *sigma, "--rotated", "sigma/hf-post_rope.safetensors", "--out", "tables.json")
    tables = ("--codebooks", "tables.json")
    verb("step", "residual", *captured, *sigma, *tables, "--out", "residual/hf.parquet")
    named = [f"{plan.ALWAYS}/{job}" for job in plan.job_names(params, plan.ALWAYS)]
    named += [f"baseline/{run}" for run in plan.baseline_runs(params)]
    verb("step", "jobs", *given, *sigma, *tables, "--measure", *named, "--results", "results")
    sources = Sources(
        baseline=sorted((mine / "results" / "baseline").rglob("*.json")),
        jobs=sorted((mine / "results" / plan.ALWAYS).rglob("*.json")),
        codebooks=[mine / "tables.json"],
        sigmas=[mine / "sigma" / "hf.json"],
        residual=[mine / "residual" / "hf.json"],
        choice=None,
    )
    metrics = build(params, sources)
    assert summary(metrics)["kl.gap"] == metrics["gap"]["measures"]["kl"]["gap"]["value"]  # of no study
    findings.write(params, metrics, judge(params, metrics), mine / "FINDINGS.md")
    text = (mine / "FINDINGS.md").read_text()
    assert "## What the gap decomposes into" in text and "other.txt" in text
    identity = [cell for cell in metrics["cells"] if cell["role"] == "identity"]
    coded = [cell for cell in metrics["cells"] if cell["role"] == "codec"]
    assert identity and all(cell["kl"]["value"] < 1e-9 for cell in identity)
    assert coded and all(cell["kl"]["value"] > 1e-6 for cell in coded)
    assert [entry["source"] for entry in metrics["gap_by_text"]] == ["mine.txt", "other.txt"]


def test_it_is_measured_in_one_line(mine, tmp_path):
    out = tmp_path / "found.json"
    small = ("--context", 64, "--eval", 32, "--windows", 3)
    text = ("--text", mine / "mine.txt", "--calib-text", mine / "other.txt")
    verb("measure", mine / "model", *text, *small, "--bits", 2, 4, "--json", out)
    found = {(row["codec"], row["bits"]): row["kl"]["value"] for row in json.loads(out.read_text())["rows"]}
    assert found["klt", 2] > found["klt", 4] > 0
