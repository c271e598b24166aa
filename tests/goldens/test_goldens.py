"""The rebuilding changes no recipe's id, no coded byte, no corruption that the gate finds and no fault of the audit."""

from __future__ import annotations

import pytest

from goldens import made

SLOW = {"mutations"}  # judges some two hundred cases
NAMES = [pytest.param(name, marks=pytest.mark.full) if name in SLOW else name for name in made.GOLDENS]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_code_makes_is_what_was_written_before_the_rebuilding(name):
    found, kept = made.GOLDENS[name](), made.kept(name)
    if isinstance(kept, dict):
        assert {key: found.get(key) for key in kept} == kept  # a new codec has none yet
    else:
        assert found == kept
