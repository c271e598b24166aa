"""One SQLite file of measured rows: opened, upgraded in place, and changed wholly or not at all."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvlab.core.errors import StorageError
from kvlab.core.output_paths import absence
from kvlab.gate.store import migrations

TIMEOUT = 30.0  # seconds to wait for another process that writes
PATIENCE = 1.0  # seconds at most to wait for the write-ahead log, which can do without
# SQLite's primary result codes (sqlite.org/rescode.html)
ERROR, BUSY, LOCKED, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, NOTADB = 1, 5, 6, 8, 10, 11, 13, 14, 26
REASONS = {
    FULL: ("storage.disk-full", "the disk is full"),
    IOERR: ("storage.disk", "the disk cannot be read or written"),
    READONLY: ("storage.read-only", "it may only be read"),
    CANTOPEN: ("storage.cannot-read", "it cannot be opened"),
    NOTADB: ("storage.no-database", "it is no SQLite database"),
    CORRUPT: ("storage.damaged", "it is damaged"),
}


class StoreLocked(StorageError):
    """Another process holds the store; nothing was changed."""

    code = "storage.locked"


@dataclass(frozen=True)
class RowStore:
    """An open store.

    Parameters
    ----------
    path : Path
        The SQLite file.
    connection : sqlite3.Connection
        To a database of this schema, in autocommit mode.
    timeout : float
        Seconds to wait for another process that writes.
    """

    path: Path
    connection: sqlite3.Connection
    timeout: float

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the write lock; what is done inside is committed at the end, or undone wholly.

        Raises
        ------
        StoreLocked
            When another process writes for longer than the timeout.
        StorageError
            When the disk is full, the file may only be read, or the like.
        """
        with _errors_in_one_line(self.path, self.timeout), migrations.transaction(self.connection):
            yield self.connection

    def select(self, statement: str, values: Sequence = ()) -> list[tuple]:
        """All rows that a statement gives, as of one moment."""
        with _errors_in_one_line(self.path, self.timeout):
            return self.connection.execute(statement, values).fetchall()


@contextmanager
def open_store(path: Path | str, timeout: float = TIMEOUT, create: bool = False) -> Iterator[RowStore]:
    """Open a store and close it again; an older database is upgraded in place first.

    Parameters
    ----------
    path : Path or str
        The SQLite file: a store, a database of the published study, or an empty one.
    timeout : float
        Seconds to wait for another process that writes.
    create : bool
        Whether to make a missing file.

    Raises
    ------
    StoreLocked
        When another process holds it for longer than the timeout.
    StorageError
        When it is missing, no database, another program's, of a newer schema, or when the disk is full.
        The database is left as it was.
    """
    path = Path(path)
    with _errors_in_one_line(path, timeout), closing(_connect(path, timeout, create)) as connection:
        try:
            migrations.upgrade(connection)
        except StorageError as error:
            raise StorageError(f"cannot use {path}: {error}", code=error.code) from None
        _log_ahead(connection, min(timeout, PATIENCE))
        yield RowStore(path, connection, timeout)


def _connect(path: Path, timeout: float, create: bool) -> sqlite3.Connection:
    if create:
        _make_folder(path.parent)
    elif (why := absence(path)) is not None:
        raise StorageError(
            f"there is no store at {path}: {why}; `kvlab gate ingest` makes one", code="storage.no-store"
        )
    if path.is_dir():
        raise StorageError(f"cannot use {path}: it is a folder; name the store's file", code="storage.no-file")
    if not create and path.is_file() and not path.stat().st_size:  # SQLite would take it, and write into it
        raise StorageError(f"cannot use {path}: it is empty; `kvlab gate ingest` makes a store", code="storage.empty")
    address = f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
    connection = sqlite3.connect(address, uri=True, timeout=timeout, isolation_level=None)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA trusted_schema = OFF")  # what an unknown database defines runs no function with effects
    return connection


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {folder}: {error.strerror}", code="storage.cannot-write") from None


def _log_ahead(connection: sqlite3.Connection, patience: float) -> None:
    """Let readers go on beside one writer, from now on; a file where that cannot be had is as safe without.

    SQLite answers at once, whatever the timeout, when two processes would wait for each other here.
    """
    deadline = time.monotonic() + patience
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if _code(error) != BUSY:
                raise
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------- errors


@contextmanager
def _errors_in_one_line(path: Path, timeout: float) -> Iterator[None]:
    """A failure of the file or the disk in one line; mistakes of this program stay what they are."""
    try:
        yield
    except (sqlite3.ProgrammingError, sqlite3.IntegrityError):
        raise
    except sqlite3.DatabaseError as error:
        if _code(error) in (BUSY, LOCKED):
            raise StoreLocked(
                f"{path} is locked by another process, {timeout:g} s were not enough; nothing was changed, try again"
            ) from error
        code, reason = REASONS.get(_code(error), ("storage.sqlite", str(error)))
        raise StorageError(f"cannot use {path}: {reason}; nothing was changed", code=code) from error


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code."""
    return getattr(error, "sqlite_errorcode", ERROR) & 0xFF
