"""`kvlab simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from functools import partial

import pytest

from refusals import refused_line

pytestmark = pytest.mark.full

ARM = {"page": 16, "seconds": [0.02, 1e-3, 1e-7, 1e-3, 2e-10], "half_width": None, "rows": 9, "undetermined": []}


@pytest.fixture
def run(tmp_path, line):
    """Exit code, stdout and stderr."""
    measured = tmp_path / "steps.json"
    arms = {"bf16": ARM | {"token_bytes": 23040}, "klt4": ARM | {"token_bytes": 5800}}
    measured.write_text(json.dumps({"arms": arms}))
    return partial(line, "simulate", "--measured", measured)


def test_each_codec_is_a_row(run, tmp_path):
    small = ("--requests", 300, "--lengths", 0.1, "--rate", 4, "--memory", "32MiB", "--workers", 2)
    code, said, err = run("azure-conv", *small, "--slo", "ttft=5,tpot=0.3", "--json", tmp_path / "a.json")
    assert code == 0, err
    assert "bf16" in said and "klt4" in said and "300 requests, 4 a second, on 2 workers" in said
    found = json.loads((tmp_path / "a.json").read_text())["arms"]
    assert found["klt4"]["capacity"] > 3.9 * found["bf16"]["capacity"]
    assert found["bf16"]["slo"] == {"ttft": 5.0, "tpot": 0.3}
    assert found["bf16"]["served"] == 300


def test_a_trace_of_a_file(run, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,37,4\n2023-11-16 18:15:47,20,9\n")
    code, said, err = run(path, "--codec", "bf16", "--swap", 1000000)
    assert code == 0, err
    assert "2 requests" in said and "klt4" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("azure-con",), "did you mean 'azure-conv'"),
        (("azure-conv", "--codec", "klt5"), "codec 'klt5' is not known"),
        (("azure-conv", "--slo", "tttf=1"), "did you mean 'ttft'"),
        (("azure-conv", "--slo", "ttft=-1"), "allowed: seconds"),
        (("azure-conv", "--memory", "3GB"), "as 512MiB"),
        (("azure-conv", "--memory", "1KiB"), "give more memory"),
        (("azure-conv", "--rate", "0"), "--rate 0"),
        (("azure-conv", "--rate", "1e-308"), "rate 1e-308: the last request would come at inf s"),
        (("azure-conv", "--rate", "1e-9"), "rate 1e-09: the last request would come at"),
        (("azure-conv", "--lengths", "nan"), "--lengths nan"),
        (("azure-conv", "--workers", "0"), "at least 1"),
    ],
)
def test_mistakes_are_one_line(run, words, said):
    refused_line(run(*words), said)


@pytest.mark.parametrize(
    "changed", [{"token_bytes": 0}, {"seconds": [1, 2]}, {"seconds": [-1, 0, 0, 0, 0]}, {"odd": 1}, {"page": 0}]
)
def test_a_measured_file_that_is_none_is_refused(tmp_path, line, changed):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"arms": {"a": ARM | {"token_bytes": 2} | changed}}))
    refused_line(line("simulate", "azure-conv", "--measured", path), f"a.{next(iter(changed))}")
