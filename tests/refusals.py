"""What a test asks of an error: its class, its stable code and the data in it, never today's sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from kvlab.core.errors import KvlabError

Refusal = TypeVar("Refusal", bound=KvlabError)


@contextmanager
def refused(error: type[Refusal], code: str | None = None, *data: object) -> Iterator[pytest.ExceptionInfo[Refusal]]:
    """The block ends in an `error` with `code` (the class's own unless one is given) whose message names all of `data`.

    Data are what was given, what is allowed and where: values, names, shapes, paths.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == (code or error.code)
    missing = [str(one) for one in data if str(one) not in str(caught.value)]
    assert not missing, f"{caught.value} does not name {missing}"
