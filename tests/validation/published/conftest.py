from pathlib import Path

import pytest

from tests.validation.published import making


@pytest.fixture(scope="session")
def every(tmp_path_factory) -> Path:
    """A folder with every family."""
    return making.every(tmp_path_factory.mktemp("published"))
