"""Where a file may be written, and why one cannot be read: what stands at a path, in words."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from kvlab.core.errors import StorageError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def refuse_no_file(path: Path | str) -> None:
    """`StorageError` where a path names no file that could be written: it is empty, a folder, a device or a pipe.

    A link counts as what it leads to. Whether there is room and permission is seen when it is written.
    """
    given = os.fspath(path)
    if not given or "\0" in given:
        raise StorageError(f"cannot write {given!r}: it is no path; name a file", code="storage.no-path")
    if given.endswith(("/", "/.", "/..")) or given in (".", ".."):
        raise StorageError(f"cannot write {given}: it is a folder; name a file", code="storage.no-file")
    try:
        mode = os.stat(given).st_mode
    except OSError:
        _refuse_inside_file(given)
        return
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no file")
        raise StorageError(f"cannot write {given}: it is {kind}; name a file", code="storage.no-file")


def _refuse_inside_file(given: str) -> None:
    """`StorageError` where a part of the path that should be a folder is none."""
    for folder in Path(given).parents:
        if os.path.lexists(folder):
            if not folder.is_dir():
                raise StorageError(f"cannot write {given}: {folder} is no folder", code="storage.no-folder")
            return


def absence(path: Path | str) -> str | None:
    """Why nothing can be read at a path; None where something stands there."""
    given = os.fspath(path)
    try:
        os.stat(given)
    except FileNotFoundError:
        if os.path.islink(given):
            return f"it is a link to {os.readlink(given)}, which is not there"
        return "no such file"
    except NotADirectoryError:
        return "no such file, as a part of the path is no folder"
    except OSError as error:
        return "it is a link that leads to itself" if error.errno == errno.ELOOP else (error.strerror or str(error))
    except ValueError as error:  # a NUL in it
        return str(error)
    return None
