"""Compiled loops of the transformers cache, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tiers import COMPILED

CASES = [Path(__file__).with_name(name) for name in ("columns_cases.py", "test_block_attention.py", "test_served.py")]


@pytest.mark.full
@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed, and torch reads all blocks")
def test_compiled_loops_read_and_write_as_torch_does():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, CASES)]
    environment = os.environ | {COMPILED: "1"}
    ended = subprocess.run(
        command, cwd=CASES[0].parents[2], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-1000:]
