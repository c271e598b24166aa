"""The compiled loops, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def passed(cases: str, **environment: str) -> None:
    """Run a file of cases in a process of its own; all must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)]
    environment = os.environ | environment
    ended = subprocess.run(command, cwd=HERE.parents[2], capture_output=True, text=True, timeout=600, env=environment)
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-1000:]


@pytest.mark.full
@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed, and torch reads all rows")
def test_the_compiled_loop_reads_what_the_codec_decodes():
    passed("compiled_cases.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param("triton_cases.py::test_pages_are_read_by_it", marks=pytest.mark.full),
        pytest.param("triton_cases.py", marks=pytest.mark.nightly),
    ],
)
def test_the_kernel_for_gpus_reads_what_torch_reads_in_tritons_interpreter(cases):
    passed(cases, TRITON_INTERPRET="1")
