"""What a test asks of an error: its class, its stable code and the data in it; of a refused line, that it is one."""

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


@contextmanager
def refused_in_one_line(
    error: type[Refusal], code: str | None = None, *data: object
) -> Iterator[pytest.ExceptionInfo[Refusal]]:
    """`refused`, and its message is one line."""
    with refused(error, code, *data) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def refused_line(answer: tuple[int, str, str], *data: object) -> str:
    """What a verb said that ended with exit code 2, nothing on stdout and one line, which names all of `data`."""
    code, out, err = answer
    assert (code, out, err.count("\n")) == (2, "", 1), answer
    missing = [str(one) for one in data if str(one) not in err]
    assert not missing, f"{err} does not name {missing}"
    return err
