"""Putting a file in its place in one step, whoever else is putting one there.

Writers may be threads of one process, or processes of several machines and containers on one shared folder, where
process ids say nothing. So each writes under a name that nobody else has, and takes away what others have left only
when it has not changed for so long that nobody can be at work on it.
"""

from __future__ import annotations

import glob
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kvlab.base import lifeline
from kvlab.base.records import storage_error

RANDOM_BYTES = 8
ABANDONED_S = 24 * 60 * 60  # seconds without a change


@contextmanager
def placed(path: Path) -> Iterator[BinaryIO]:
    """An empty file beside `path`, open for reading and writing; on success durable, and then at `path`.

    Raises
    ------
    StorageError
        When the disk is full or the folder cannot be written; `path` is left as it was.
    RunGone
        When the run that started this job is over; `path` is left as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(RANDOM_BYTES)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        lifeline.check()
        os.replace(temporary, path)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove what writers of `path` left when they were killed, once it is old."""
    name = f".{glob.escape(path.name)}.{'[0-9a-f]' * 2 * RANDOM_BYTES}.tmp"
    for left in path.parent.glob(name):
        with suppress(OSError):  # somebody else has taken it away
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                left.unlink()
