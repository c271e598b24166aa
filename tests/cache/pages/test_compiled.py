"""The compiled loop, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("compiled_cases.py")


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed, and torch reads all rows")
def test_the_compiled_loop_reads_what_the_codec_decodes():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    ended = subprocess.run(command, cwd=CASES.parents[3], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-1000:]
