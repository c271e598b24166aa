"""Loops that numba compiles, kept on disk under the code that they were made of.

Where numba is not installed, nothing imports this module.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

from numba import njit
from numba.core import event

SUMS = {"contract", "reassoc", "nsz"}
"""What a compiler may do to sums: take them in another order, as a matrix product would. NaN and infinity stay."""


class Announced(event.Listener):
    """Says why a first call takes long, when a loop of kvlab is not on disk yet."""

    def on_start(self, what: event.Event) -> None:
        """See `numba.core.event.Listener`."""
        if what.data["dispatcher"].py_func.__module__.startswith("kvlab."):
            announce()

    def on_end(self, what: event.Event) -> None:
        """Nothing is left to say."""


@cache
def announce() -> None:
    """The line, once a process."""
    logging.getLogger(__name__).warning("kvlab compiles its loops for this processor, once: this takes up to a minute")


event.register("numba:compile", Announced())


def compiled(function: Callable) -> Callable:
    """A function compiled when it is first called, and kept on disk where there is a place for that.

    numba looks at the time and size of the function's own file alone. After an upgrade it would run machine code made
    with constants of before, or fail to load an index that names a class which is gone. So the code of all codecs is
    part of the function's name, of which numba makes the names of its files.

    Parameters
    ----------
    function : callable
        Of a file in `kvlab.codecs`; its qualified name is changed.

    Returns
    -------
    callable
    """
    function.__qualname__ += f"_{code()}"
    options = {"nogil": True, "fastmath": SUMS, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder can be written to: each process compiles anew
        return njit(**options)(function)


@cache
def code() -> str:
    """A digest of every file of `kvlab.codecs`, in hexadecimal digits."""
    folder, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    return found.hexdigest()[:16]
