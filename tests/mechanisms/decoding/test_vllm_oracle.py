"""The filters and the acceptance of drafts are those of vLLM's operations; its processor follows rows. No engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")


@pytest.mark.nightly
def test_vllms_operations_agree(root):
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "VLLM_LOGGING_LEVEL": "ERROR"}
    script = Path(__file__).with_name("vllm_oracle.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    gap, different, accepted, processed = done.stdout.split()[-4:]
    assert float(gap) < 1e-6
    assert int(different) == 0 and int(accepted) > 300
    assert processed == "True"
