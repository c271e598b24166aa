"""What a file of kvlab's is, seen from its first bytes; the ending of its name decides nothing."""

from __future__ import annotations

import struct
from pathlib import Path

from kvlab.core.errors import CalibrationMismatch, ParamsError, StorageError

SNAPSHOT = b"KVLABSNP"
PUBLISHED = struct.pack("<Q", 0x4B56464C41534831)  # reads KVFLASH1 from its high byte down
CODED, ARCHIVE = b"KVLS", b"KVLA"
CACHES = {
    SNAPSHOT: "a snapshot, as `kvlab snapshot save` writes it",
    PUBLISHED: "a snapshot of the published KVFLASH1 layout",
    CODED: "a coded cache, as `kvlab encode` writes it",
    ARCHIVE: "an archive of a cache, as `kvlab encode` writes it",
}
"""Files that hold a cache, by their first bytes."""
CODEC_ENDING, SNAPSHOT_ENDING = ".kv", ".kvs"
FRONT = 16  # bytes that tell


def magic_of(front: bytes) -> bytes | None:
    """The one of `CACHES` that begins so; a snapshot's begins as an archive's does, and is longer."""
    return next((magic for magic in CACHES if front.startswith(magic)), None)


def kind_of(front: bytes) -> str | None:
    """What begins so, in words; None for a file of somebody else."""
    if magic := magic_of(front):
        return CACHES[magic]
    if is_tensors(front):
        return "a file of tensors (safetensors), as `kvlab calibrate` writes one for a codec"
    return None


def is_tensors(front: bytes) -> bool:
    """Whether what begins so is safetensors: after the length of its header comes JSON."""
    return magic_of(front) is None and front[8:9] == b"{"


def is_calibration_file(path: Path | str) -> bool:
    """Whether a file is what `kvlab calibrate` writes and no JSON: by its name, or by how safetensors begin.

    They begin with the length of their header, which has a zero byte. Raises as `refuse_caches`.
    """
    refuse_caches(path)
    with open(path, "rb") as file:
        return Path(path).suffix == CODEC_ENDING or b"\0" in file.read(8)


def recipe_json(path: Path | str) -> dict:
    """What a JSON recipe file says; its recipe is not looked at.

    Raises
    ------
    StorageError
        The file cannot be read or is no JSON.
    ParamsError
        It holds no `recipe`.
    """
    from kvlab.core.records import read_json

    try:
        said = read_json(path)
    except StorageError as error:
        raise StorageError(f"{error}; `kvlab recipe` or `kvlab calibrate` writes a recipe file") from None
    if not isinstance(said, dict) or "recipe" not in said:
        raise ParamsError(
            f"{path} is no recipe file, it has no `recipe`; `kvlab recipe` or `kvlab calibrate` writes one",
            code="params.no-recipe",
        )
    return said


def refuse_caches(path: Path | str) -> None:
    """Refuse a cache where a codec is to be named.

    Raises
    ------
    StorageError
        The file cannot be read.
    CalibrationMismatch
        It holds a cache.
    """
    try:
        with open(path, "rb") as file:
            front = file.read(FRONT)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise StorageError(f"cannot read {path}: {reason}") from None
    if magic_of(front):
        raise CalibrationMismatch(
            f"{path} is {kind_of(front)}, not the file of a codec; give what `kvlab calibrate` or `kvlab recipe` wrote",
            code="calibration.other-kind",
        )
