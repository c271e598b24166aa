"""The corruptions, each judged once."""

from __future__ import annotations

import pytest

from validation.gate import corruptions


@pytest.fixture(scope="session")
def lines() -> list[dict]:
    """A line for each corruption, as `corruptions.table` makes them."""
    return corruptions.table()
