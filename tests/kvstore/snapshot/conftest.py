import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """One folder for many examples, each of which replaces its file."""
    return tmp_path_factory.mktemp("snapshot")
