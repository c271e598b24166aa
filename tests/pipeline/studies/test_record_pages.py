"""What the five studies with a page of their own share: their records are told apart, and no page needs torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.core.errors import StorageError
from kvlab.core.records import write_json
from kvlab_pipeline.cli.steps import STUDIES
from kvlab_pipeline.studies import page
from refusals import refused


@pytest.mark.parametrize("study", STUDIES)
def test_another_file_is_no_record(study, tmp_path):
    write_json(tmp_path / "other.json", {"arms": []})
    with refused(StorageError, "storage.no-record", tmp_path / "other.json"):
        page.write(study, [tmp_path / "other.json"], tmp_path / "PAGE.md")
    assert not (tmp_path / "PAGE.md").exists()


def test_no_page_needs_torch():
    modules = [f"kvlab_pipeline.studies.{study}.{part}" for study in STUDIES for part in ("record", "tables")]
    program = (
        f"import sys, kvlab_pipeline.studies.page, {', '.join(modules)};"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    source = Path(__file__).parents[3] / "src"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(source)}
    )
    assert answer.stdout.strip() == "[]", answer.stderr
