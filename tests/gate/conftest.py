"""What all tests of the gate share."""

from __future__ import annotations

from functools import cache

import pytest

from kvlab.gate.registry import reading


@pytest.fixture(autouse=True, scope="session")
def shipped_registry_read_once():
    """Its two files take a tenth of a second and more to read, and a hundred lines of `kvlab gate` read them here."""
    once = cache(reading.read_yaml)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reading, "read_yaml", lambda path: (once if path.parent == reading.SHIPPED else once.__wrapped__)(path)
        )
        yield
