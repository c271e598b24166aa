import pytest
import torch

from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.paging.pager import PagerConfig


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors gain nothing from threads, and lose a lot to them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def geometry() -> Geometry:
    """Two layers of two KV heads, chunks of four tokens."""
    return Geometry(layers=2, kv_heads=2, head_dim=4, dtype="float32", chunk_tokens=4)


@pytest.fixture
def config() -> PagerConfig:
    """Eight blocks, which is one more than the floor."""
    return PagerConfig(pool_tokens=32, chunk_tokens=4)
