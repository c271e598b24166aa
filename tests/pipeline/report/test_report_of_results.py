"""The whole reporting wing on a folder of planted results: tables in, report out."""

from __future__ import annotations

import pytest

from kvlab_pipeline.report import findings, metrics
from kvlab_pipeline.report.verdict import judge
from pipeline.report.synthetic import Effects, small_params, write_results

pytestmark = pytest.mark.full

PLANTED = (
    "how much of its sketch's energy the codec's PCA keeps"  # `variance_ratio`, the largest of the planted effects
)
CLAIM = "- `variance_ratio` going from `1.0` to `0.95`"


@pytest.mark.parametrize(
    ("engines", "effects", "answer"),
    [
        (["hf", "vllm"], Effects(), PLANTED),
        (["hf", "vllm"], Effects(codec_disagreement=0.1), "**Withheld.**"),
        (["hf"], Effects(), PLANTED),
        (["vllm"], Effects(), PLANTED),
    ],
    ids=["agree", "disagree", "hf", "vllm"],
)
def test_report_of_planted_results(tmp_path, engines, effects, answer):
    one = {"calibration": {"engines": ["hf"]}, "gap": {"origins": ["hf"]}, "cells": {"other-calibration": None}}
    some = {} if effects == Effects() and len(engines) == 2 else {"studies": []}  # all where all is told
    params = small_params(engines=engines, stats={"resamples": 200}, **some, **(one if engines == ["hf"] else {}))
    there = write_results(tmp_path, params, effects)
    found = metrics.build(params, there.sources)
    out = tmp_path / "FINDINGS.md"
    findings.write(params, found, judge(params, found), out)
    text = out.read_text()
    front, _, rest = text.partition("\n## What the gap decomposes into\n")
    answered = front.partition("\n## What separates the published study's two settings here\n")[2].partition("\n## ")[0]
    if answer == PLANTED:
        (first, *_) = [row for row in answered.splitlines() if row.startswith("| ") and "---" not in row][1:]
        assert PLANTED in first and "clear of zero" in first and CLAIM in rest
    else:
        assert answered.strip().startswith(answer) and CLAIM not in text
    assert "None" not in text and "nan" not in text
    if engines == ["hf"]:
        assert "`vllm`" not in text and "withheld" not in text.lower()
    if engines == ["vllm"]:
        assert "only vllm was measured" in text  # against the HF truth, unchecked: the baseline is withheld
