from __future__ import annotations

import pytest

from kvlab.core.model import ModelInfo, resolve
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.paging.config import PagerConfig


@pytest.fixture(scope="session")
def info(tiny_params) -> ModelInfo:
    return resolve(tiny_params.model)


@pytest.fixture(scope="session")
def model(info) -> PagedModel:
    """The tiny model in float32: 3 layers, 4 heads, 2 KV heads of 32."""
    return PagedModel.load(info)


@pytest.fixture(scope="session")
def halved(info) -> PagedModel:
    """The same in bfloat16."""
    return PagedModel.load(info, "bfloat16")


@pytest.fixture
def roomy() -> PagerConfig:
    """More than the tiny model has positions for."""
    return PagerConfig(pool_tokens=256, chunk_tokens=8)


@pytest.fixture
def small() -> PagerConfig:
    """Room for 40 tokens."""
    return PagerConfig(pool_tokens=40, chunk_tokens=8, sink_chunks=1, tail_chunks=1)
