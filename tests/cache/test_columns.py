"""Compiled loops of the transformers cache, in a process of their own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from own_process import passed
from tiers import COMPILED, NIGHTLY

HERE = Path(__file__).parent
CASES = [HERE / name for name in ("columns_cases.py", "test_block_attention.py", "test_served.py")]


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed, and torch reads all blocks")
@pytest.mark.parametrize(
    "marks",
    [pytest.param(f"not {NIGHTLY}", marks=pytest.mark.full), pytest.param(NIGHTLY, marks=pytest.mark.nightly)],
)
def test_compiled_loops_read_and_write_as_torch_does(marks):
    passed(*CASES, marks=marks, **{COMPILED: "1"})
