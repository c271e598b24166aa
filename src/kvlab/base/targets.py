"""Where a file may be written: what stands there is a file or nothing, so that nothing else is ever replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvlab.base.errors import StorageError

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
        raise StorageError(f"cannot write {given!r}: it is no path; name a file")
    if given.endswith(("/", "/.", "/..")) or given in (".", ".."):
        raise StorageError(f"cannot write {given}: it is a folder; name a file")
    try:
        mode = os.stat(given).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no file")
        raise StorageError(f"cannot write {given}: it is {kind}; name a file")
