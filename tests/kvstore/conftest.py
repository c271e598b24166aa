import pytest

from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import Geometry


@pytest.fixture
def geometry() -> Geometry:
    """Two layers of two KV heads, chunks of four tokens."""
    return Geometry(layers=2, kv_heads=2, head_dim=4, dtype="float32", chunk_tokens=4)


@pytest.fixture
def config() -> PagerConfig:
    """Eight blocks, which is one more than the floor."""
    return PagerConfig(pool_tokens=32, chunk_tokens=4)
