"""A fresh clone takes its results from a remote, here a folder: no program runs."""

from __future__ import annotations

import re
import sys

import pytest


@pytest.fixture
def clone(lab, tmp_path):
    """A clone of `lab` by git alone, beside a remote that `lab` has pushed to."""
    lab.run("dvc", "remote", "add", "--default", "--force", "shelf", tmp_path / "shelf")
    lab.run("git", "commit", "--quiet", "--all", "--message", "remote")
    lab.run("dvc", "push", "--quiet", "--run-cache")
    lab.run("git", "clone", "--quiet", lab.root, tmp_path / "clone")
    return type(lab)(tmp_path / "clone", tmp_path / "clone-trace")


@pytest.mark.full
def test_a_clone_restores_the_report_without_running_anything(clone, reproduced):
    assert clone.files() == {}
    clone.run("dvc", "repro", "--pull", "--allow-missing")
    said = clone.run(sys.executable, "workflow/scripts/ci_cached.py", "--require-cached")
    assert clone.ran() == []
    assert "0 run." in said and all(f"\n  {stage} " in said for stage in ("data", "studies", "report"))
    findings = "results/gap/FINDINGS.md"
    assert clone.files()[findings] == reproduced.files()[findings]


@pytest.mark.nightly
def test_a_comment_does_not_cost_a_clone_its_cached_results(clone):
    (clone.root / "src/kvlab/codecs/block/codec.py").open("a").write("\n# a comment\n")
    said = clone.run(sys.executable, "workflow/scripts/ci_cached.py", "--require-cached")
    assert clone.ran() == [] and "1 run." in said and re.search(r"^  code +run$", said, re.MULTILINE)
    (clone.root / "src/kvlab/codecs/block/codec.py").open("a").write("\nNEW = 1\n")
    refused = clone.attempt(sys.executable, "workflow/scripts/ci_cached.py", "--require-cached")
    assert refused.returncode == 1 and clone.ran() == []
    assert refused.stderr.splitlines()[-1].startswith("error: stage studies would have to run: ")


@pytest.mark.nightly
def test_a_clone_takes_from_the_run_cache_what_its_lock_does_not_know(clone, reproduced):
    (clone.root / "dvc.lock").unlink()
    clone.run("dvc", "repro", "--pull", "calibration")
    assert clone.ran() == []
    sigma = "calib/sigma/reference/hf.safetensors"
    assert clone.files()[sigma] == reproduced.files()[sigma]
