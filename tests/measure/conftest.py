"""What the tests of measuring share."""

from __future__ import annotations

import pytest

from kvlab.core.model import resolve
from kvlab.text import corpus


@pytest.fixture(scope="session")
def calib_windows(tiny_params, tiny_windows):
    """The windows of the tiny model, of all splits."""
    return corpus.load(tiny_windows, resolve(tiny_params.model).model_hash)
