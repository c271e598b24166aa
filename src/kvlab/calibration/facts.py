"""What a file of the calibration says of itself: read only after it was found to say it."""

from __future__ import annotations

from pathlib import Path

from kvlab.core.errors import CalibrationMismatch
from kvlab.core.records import from_header, read_json

Fields = dict[str, type]


def read_facts(path: Path, fields: Fields, verb: str) -> dict:
    """A JSON object that has `fields` of these types; `verb` is the one that writes such files.

    Raises
    ------
    StorageError
        The file is missing or no JSON.
    CalibrationMismatch
        It is another JSON; names the first field that it lacks.
    """
    return checked(read_json(path), path, fields, verb)


def header_facts(metadata: dict[str, str] | None, path: Path, fields: Fields, verb: str) -> dict:
    """The same of the header of a safetensors file."""
    try:
        found = from_header(metadata)
    except ValueError:
        found = {}
    return checked(found, path, fields, verb)


def checked(found: object, path: Path, fields: Fields, verb: str) -> dict:
    """`found` itself; `CalibrationMismatch` unless it has all `fields`."""
    if not isinstance(found, dict):
        raise CalibrationMismatch(
            f"{path} is not what `kvlab step {verb}` writes: it is no JSON object", code="calibration.other-file"
        )
    for name, kind in fields.items():
        if not isinstance(found.get(name), kind):
            raise CalibrationMismatch(
                f"{path} is not what `kvlab step {verb}` writes: it has no {name!r}; run `kvlab step {verb}`",
                code="calibration.other-file",
            )
    return found
