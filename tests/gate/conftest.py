"""What all tests of the gate share."""

from __future__ import annotations

from functools import cache

import pytest

from kvlab.gate.registry import reading


@pytest.fixture(autouse=True, scope="session")
def shipped_registry_read_once():
    """Its two files take a tenth of a second and more to read, and a hundred lines of `kvlab gate` read them here."""
    read = reading.read_yaml
    shipped = cache(read)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "read_yaml", lambda path: (shipped if path.parent == reading.SHIPPED else read)(path))
        yield
