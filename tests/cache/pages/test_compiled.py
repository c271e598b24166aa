"""The compiled loops, each in a process of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from own_process import passed
from tiers import NIGHTLY

HERE = Path(__file__).parent


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed, and torch reads all rows")
@pytest.mark.parametrize(
    "marks",
    [pytest.param(f"not {NIGHTLY}", marks=pytest.mark.full), pytest.param(NIGHTLY, marks=pytest.mark.nightly)],
)
def test_the_compiled_loop_reads_what_the_codec_decodes(marks):
    passed(HERE / "compiled_cases.py", marks=marks)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.nightly
def test_the_kernel_for_gpus_reads_what_torch_reads_in_tritons_interpreter():
    passed(HERE / "triton_cases.py", TRITON_INTERPRET="1")
