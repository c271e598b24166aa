"""The log on disk: a line for each entry, written once and never again.

Lines are added under a lock of the kernel, in one write, and are on the disk when `append` returns. A process that is
killed amid its write leaves a last line without its end: nobody was told that it is there, so the next `append` takes
it away and says so, and whoever reads before is told of it.

An entry says of a job what it made of what: nothing of when, where or how long, so that the same work leaves the same
entry on every machine. The encoding is the canonical JSON of recipes: keys sorted, no spaces, ASCII. It holds texts
alone; two entries that differ anywhere are different bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from kvlab.codecs.stream.tree import LEAF
from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import StorageError, UserError
from kvlab.core.records import storage_error
from kvlab_mechanisms.ledger.merkle import Tree

FOLDER = Path("results/ledger")
LOG = FOLDER / "log.jsonl"
END = b"\n"
LOOK = 1 << 16  # bytes that are read at a time to find where the last whole line ends
SHA256 = re.compile(r"[0-9a-f]{64}")
ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))  # canonical JSON, as `kvlab.core.recipe` writes it
Digests = dict[str, str]


class LogEntry(Frozen):
    """One job.

    Attributes
    ----------
    job : str
        Its rule, and its wildcards: ``sigma_engine engine=hf model=smollm2-135m``.
    inputs, outputs : dict of str to str
        sha256 of each file by its path, 64 hexadecimal digits; of a folder that of its files
        (`kvlab_mechanisms.ledger.jobs`).
    params : str
        sha256 of the job's parameters as Snakemake keeps them, the digests of its code among them.
    versions : dict of str to str
        Packages that decide a number.
    """

    job: str = Field(min_length=1)
    inputs: Digests
    outputs: Digests = Field(min_length=1)
    params: str
    versions: dict[str, str]


def encoded(entry: LogEntry) -> bytes:
    """The bytes of an entry, without the end of the line; `UserError` where a digest is none."""
    for path, digest in [*entry.inputs.items(), *entry.outputs.items(), ("the parameters", entry.params)]:
        if not SHA256.fullmatch(digest):
            raise UserError(
                f"the digest of {path} is {digest!r}; allowed: 64 hexadecimal digits of a sha256", code="user.no-digest"
            )
    return ENCODER.encode(vars(entry)).encode()


def decoded(line: bytes, place: str) -> LogEntry:
    """The entry of a line; `StorageError`, which names the `place`, for any other bytes than `encoded` writes."""
    try:
        data = json.loads(line)
        entry = LogEntry.model_validate(data) if isinstance(data, Mapping) else None
        right = entry is not None and encoded(entry) == line
    except (ValueError, RecursionError, ValidationError, UserError):
        right = False
    if not right:
        raise StorageError(
            f"{place} is no entry as the ledger writes them: it was changed, or is of another program",
            code="storage.no-entry",
        )
    return entry


@dataclass(frozen=True)
class ReadLog:
    """What lies in a log.

    Attributes
    ----------
    lines : tuple of bytes
        The whole ones, without their ends.
    torn : int
        Bytes of a last line that has no end.
    """

    path: Path
    lines: tuple[bytes, ...]
    torn: int

    def entries(self) -> list[LogEntry]:
        """All of them, each checked; `StorageError` names the first line that is none."""
        return [decoded(line, f"{self.path}, line {number}") for number, line in enumerate(self.lines, 1)]

    def tree(self) -> Tree:
        """The hash tree over the lines as they are."""
        hashed = hashlib.sha256
        return Tree(hashed(LEAF + line).digest() for line in self.lines)  # `tree.leaf`, in one call for each line


def read(path: Path | str = LOG) -> ReadLog:
    """A log; `StorageError` where there is none."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StorageError(
            f"cannot read the ledger {path}: {error.strerror}; any rule that runs begins one", code="storage.no-ledger"
        ) from None
    *lines, rest = data.split(END)
    return ReadLog(Path(path), tuple(lines), len(rest))


def append(entries: Sequence[LogEntry], path: Path | str = LOG) -> int:
    """Add entries after all others, and have them on the disk.

    Returns
    -------
    int
        Bytes of a torn line that were taken away first; 0 as a rule.

    Raises
    ------
    StorageError
        It cannot be written; then none of the entries is there.
    """
    path, data = Path(path), b"".join(encoded(entry) + END for entry in entries)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # goes with the process, whatever becomes of it
            size = file.seek(0, os.SEEK_END)
            whole = _whole(file, size)
            file.truncate(whole)
            try:
                _write(file, data)
                os.fsync(file.fileno())
            except OSError:
                file.truncate(whole)
                raise
        return size - whole
    except OSError as error:
        raise storage_error(path, error) from None


def _write(file, data: bytes) -> None:
    """All bytes; a disk that fills up takes a part of them and refuses the next."""
    while data:
        data = data[file.write(data) :]


def _whole(file, size: int) -> int:
    """How many of the bytes are of whole lines."""
    at = size
    while at:
        begin = max(at - LOOK, 0)
        file.seek(begin)
        found = file.read(at - begin).rfind(END)
        if found >= 0:
            return begin + found + 1
        at = begin
    return 0
