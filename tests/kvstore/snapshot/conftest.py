import pytest

from kvlab.kvstore.snapshot import read
from kvstore.snapshot import making


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """One folder for many examples, each of which replaces its file."""
    return tmp_path_factory.mktemp("snapshot")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """`making.written`, open."""
    saved = making.written(tmp_path_factory.mktemp("written") / "s")
    with read.open(saved.path) as opened:
        yield opened
