"""Entries of jobs out of the files that they read and wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from kvlab.core.errors import StorageError, UserError
from kvlab.core.records import versions
from kvlab_mechanisms.ledger import log
from kvlab_mechanisms.ledger.log import LogEntry

LEFT_OUT = {"__pycache__", ".snakemake_timestamp"}  # of a folder: what tools leave in it


def digest_of(path: Path | str) -> str:
    """sha256 of a file; of a folder that of its files' names and digests, in order. `StorageError` if it is neither."""
    path = Path(path)
    try:
        if path.is_dir():
            files = sorted(one for one in path.rglob("*") if one.is_file() and not LEFT_OUT & set(one.parts))
            named = [[one.relative_to(path).as_posix(), digest_of(one)] for one in files]
            return hashlib.sha256(json.dumps(named).encode()).hexdigest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from None


def entry_of(
    job: str, inputs: Iterable[str], outputs: Iterable[str], params: object, known: dict[str, str] | None = None
) -> LogEntry:
    """The entry of a job that has ended.

    Parameters
    ----------
    params : object
        What decides the job beside its files, as JSON takes it.
    known : dict of str to str, optional
        Digests that need not be taken again, by path.
    """
    known = known or {}
    told = json.dumps(params, sort_keys=True, separators=(",", ":"))
    return LogEntry(
        job=job,
        inputs={path: known.get(path) or digest_of(path) for path in inputs},
        outputs={path: known.get(path) or digest_of(path) for path in outputs},
        params=hashlib.sha256(told.encode()).hexdigest(),
        versions=versions(),
    )


def enter(entries: Iterable[LogEntry], path: Path | str = log.LOG) -> tuple[int, int]:
    """Add those that are not the last of their job already: work that came out as before leaves no second entry.

    Returns
    -------
    (int, int)
        Entries that were added, and bytes of a torn line that were taken away first.
    """
    last = {entry.job: entry for entry in log.read(path).entries()} if Path(path).exists() else {}
    new = [entry for entry in entries if last.get(entry.job) != entry]
    return len(new), log.append(new, path) if new else 0


def latest(entries: Iterable[LogEntry]) -> dict[str, tuple[int, str]]:
    """The number of the last entry that wrote each file, and what it wrote."""
    return {path: (n, digest) for n, entry in enumerate(entries) for path, digest in entry.outputs.items()}


def others(entries: Iterable[LogEntry]) -> list[str]:
    """Files that are there and not what the last job that wrote them left."""
    return sorted(
        path for path, (_, told) in latest(entries).items() if Path(path).exists() and digest_of(path) != told
    )


def number_of(entries: list[LogEntry], path: str) -> int:
    """The last entry that wrote a file as it is now; `UserError` where there is none."""
    found = latest(entries)
    if path not in found:
        raise UserError(
            f"no entry of the ledger wrote {path}; it names files as the rules do, from the study's folder",
            code="user.not-in-ledger",
        )
    number, told = found[path]
    if digest_of(path) != told:
        raise UserError(
            f"{path} is not what entry {number} wrote: it was changed after, or made by no rule",
            code="user.changed-output",
        )
    return number
