"""Which codecs of whole caches a study or the gate asks for: what is captured and fitted for them hangs on that alone.

It is a file, so that a job that reads it runs again when its content is another one, and not with every other change
of the parameters that say so. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvlab.calibration.facts import read_facts
from kvlab.core.errors import CalibrationMismatch, UnknownName
from kvlab.core.recipe import WHOLE
from kvlab.core.records import write_json


def write_asked(codecs: Sequence[str], out: Path) -> None:
    """Write the names of `codecs`, each once and in the order of `WHOLE`; `UnknownName` for one that is not there."""
    for name in codecs:
        if name not in WHOLE:
            raise UnknownName("codec of whole caches", name, WHOLE)
    write_json(out, {"codecs": [name for name in WHOLE if name in codecs]})


def read_asked(path: Path) -> tuple[str, ...]:
    """The names that a file holds.

    Raises
    ------
    StorageError, CalibrationMismatch
        It cannot be read, or is another file.
    """
    found = read_facts(path, {"codecs": list}, "asked")["codecs"]
    if strange := [name for name in found if name not in WHOLE]:
        raise CalibrationMismatch(
            f"{path} names {strange[0]!r}, which codes no whole caches; run `kvlab step asked`",
            code="calibration.codec-of-tensors",
        )
    return tuple(found)
