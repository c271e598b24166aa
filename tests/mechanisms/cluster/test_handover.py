"""Hand-overs between two processes, in a pytest of their own.

Bits of two processes are compared: what other files' tests leave in this one, such as an engine, may round otherwise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from own_process import passed

pytestmark = pytest.mark.nightly


def test_hand_overs_give_the_bits_of_one_process():
    passed(Path(__file__).parent / "handover_cases.py")
