"""Snakemake's records of how files were made, and why a file may not be what its record tells of."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path

PULLED = Path(".snakemake/pulled.json")  # files that `pull` touched, with the end that Snakemake then recorded
STAMP = ".snakemake_timestamp"  # Snakemake keeps the time of a folder in it
# A job may open its log just before Snakemake notes its start; Snakemake itself takes longer than this to start.
SLACK = 0.5  # seconds


class Records:
    """Snakemake's metadata of this folder."""

    def __init__(self):
        from snakemake.io import IOFile
        from snakemake.persistence.file import FilePersistence

        self.store, self.file = FilePersistence(), IOFile

    def of(self, path):
        """The record of a file, or None."""
        return self.store.metadata(self.file(path))

    def incomplete(self, paths):
        """Those whose job began and did not end; what is public of this takes jobs."""
        return self.store._filter_incomplete_keys(paths)


def doubt(path, record, pulled):
    """Why a file may not be what its record tells of; None when there is no doubt."""
    if record is None:
        return "Snakemake has no record of it, as after a copy by hand"
    began = 0.0
    if pulled.get(path) != record.endtime:
        if not any(modified(Path(log)) >= record.starttime - SLACK for log in record.log or []):
            return "it was touched, not made: its log is missing or older than its record"
        began = record.starttime - SLACK
    if modified(stamped(path)) != record.endtime or not all(began <= time <= record.endtime for time in inside(path)):
        return "it was changed after Snakemake recorded it"
    for file, checksum in (record.input_checksums or {}).items():
        if checksum != digest(file):
            return f"it was made from another {file}"
    return None


def stamped(path):
    """The file whose time Snakemake takes for that of a file or folder."""
    return Path(path, STAMP) if Path(path).is_dir() else Path(path)


def inside(path):
    """Times of a folder and of everything in it; none for a file."""
    if not Path(path).is_dir():
        return []
    return [modified(entry) for entry in (Path(path), *Path(path).rglob("*"))]


def modified(path):
    """When a file was last written; never, if it is not there."""
    return path.stat().st_mtime if path.exists() else -1.0


@cache
def digest(path):
    """sha256 of a file as Snakemake writes it; None if it is not there."""
    if not Path(path).is_file():
        return None
    with open(path, "rb") as stream:
        return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"


def read_pulled():
    """Files that `pull` touched, by path: touched since DVC vouched for them, and so as good as made."""
    return json.loads(PULLED.read_text()) if PULLED.exists() else {}


def note_pulled(made, records):
    """Remember which records are those of `pull`; any later touch writes another end."""
    ends = read_pulled() | {one.path: records.of(one.path).endtime for one in made}
    draft = PULLED.with_name(f".{PULLED.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(ends, indent=1, sort_keys=True))
    draft.replace(PULLED)
