from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def ground(hf_engine, tiny_windows):
    """The tiny model and the beginnings of its windows."""
    from kvlab.text import corpus
    from validation.planted.ground import Ground

    return Ground.of(hf_engine, corpus.load(tiny_windows, hf_engine.info.model_hash))
