import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors gain nothing from threads, and lose a lot to them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
