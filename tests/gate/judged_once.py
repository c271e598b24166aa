"""The table of all corruptions, which each page of the gate has and which depends on the code alone: made once."""

from __future__ import annotations

import copy
import functools

import pytest

from kvlab_pipeline.gate_page.corruptions import mutations

table = mutations.table
every = functools.cache(table)


@pytest.fixture(autouse=True, scope="module")
def corruptions_judged_once():
    """A copy of the same table for all tests of a folder whose `conftest.py` imports this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutations, "table", lambda *given: table(*given) if given else copy.deepcopy(every()))
        yield
