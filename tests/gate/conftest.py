"""What the gate's tests share."""

from __future__ import annotations

import copy
import functools

import pytest

from kvlab_pipeline.gate_page.corruptions import mutations

every = functools.cache(mutations.table)


@pytest.fixture(autouse=True, scope="module")
def corruptions_judged_once():
    """Each page has the table of all corruptions, which depends on the code alone: it is made once for all tests."""
    table = mutations.table
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutations, "table", lambda *given: table(*given) if given else copy.deepcopy(every()))
        yield
