"""A file's checksum is computed once, as long as it is the same file."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake.io import _IOFile

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"


@pytest.fixture
def asked(monkeypatch):
    """Asks Snakemake for a file's checksum; and the files that were read for it, in their order."""
    read = []

    async def computed(self, threshold=None, force=False, algorithm=None):
        read.append(self.file)
        return hashlib.sha256(Path(self.file).read_bytes()).hexdigest() if Path(self.file).is_file() else None

    monkeypatch.setattr(_IOFile, "checksum", computed)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    importlib.import_module("checksums").keep()
    ask = _IOFile.checksum
    return lambda path, **how: asyncio.run(ask(SimpleNamespace(file=str(path), is_storage=False), 10, **how)), read


def test_a_file_is_read_once_and_again_when_it_is_another(asked, tmp_path):
    checksum, read = asked
    file, other = tmp_path / "weights", tmp_path / "other"
    file.write_bytes(b"first")
    first = checksum(file)
    assert checksum(file) == first == hashlib.sha256(b"first").hexdigest() and len(read) == 1
    file.write_bytes(b"other")  # as many bytes
    os.utime(file, ns=(1, 1))
    assert checksum(file) == hashlib.sha256(b"other").hexdigest() and len(read) == 2
    other.write_bytes(b"first")
    os.utime(other, ns=(1, 1))
    other.replace(file)  # of the same size and time
    assert checksum(file) == first and len(read) == 3


def test_what_is_no_file_and_another_algorithm_are_asked_for_anew(asked, tmp_path):
    checksum, read = asked
    (tmp_path / "file").write_bytes(b"x")
    for path, how in [(tmp_path, {}), (tmp_path, {}), (tmp_path / "absent", {}), (tmp_path / "absent", {})]:
        assert checksum(path, **how) is None
    checksum(tmp_path / "file")
    checksum(tmp_path / "file", algorithm=hashlib.md5)
    assert len(read) == 6


def test_snakemake_has_what_is_replaced():
    names = list(inspect.signature(_IOFile.checksum).parameters)
    assert names == ["self", "threshold", "force", "algorithm"]
