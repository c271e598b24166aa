"""The compiled loops, each in a process of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from own_process import passed

HERE = Path(__file__).parent


@pytest.mark.full
@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed, and torch reads all rows")
def test_the_compiled_loop_reads_what_the_codec_decodes():
    passed(HERE / "compiled_cases.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param("triton_cases.py::test_pages_are_read_by_it", marks=pytest.mark.full),
        pytest.param("triton_cases.py", marks=pytest.mark.nightly),
    ],
)
def test_the_kernel_for_gpus_reads_what_torch_reads_in_tritons_interpreter(cases):
    passed(HERE / cases, TRITON_INTERPRET="1")
