"""The schema of the store, and how an older database becomes one: in place, by additions only, all or nothing.

`PRAGMA user_version` counts the numbered migrations that a database has been through. Columns are not numbered: which
ones a table needs is the catalogue's to say, and those that it lacks are added, so that a database that got only some
of them is completed like any other. Nothing is renamed, dropped, copied or rewritten.

The published study's database is one table, `benchmark_runs`, with no version. It gains the columns that the study's
own later program writes, so that this program and that one can both go on with the same file.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvlab.core.errors import StorageError
from kvlab.gate.catalogue import BY_NAME, sql_columns

APPLICATION = 0x6B766C62  # `kvlb`: PRAGMA application_id, whose database this is
PUBLISHED_TABLE = "benchmark_runs"
PUBLISHED_FLAGS = (("mechanism_eval_registered", "INTEGER"), ("quality_eval_registered", "INTEGER"))

TABLES = (
    "CREATE TABLE runs (run TEXT PRIMARY KEY NOT NULL, ingested_at TEXT NOT NULL)",
    # the catalogue's columns are added to these; `named_run` is the run that a row names when it is ingested as another
    """CREATE TABLE rows (
        run TEXT NOT NULL REFERENCES runs (run),
        row_id TEXT NOT NULL,
        named_run TEXT,
        embedded TEXT,
        digest TEXT NOT NULL,
        PRIMARY KEY (run, row_id))""",
    """CREATE TABLE evidence (
        run TEXT NOT NULL,
        row_id TEXT NOT NULL,
        place INTEGER NOT NULL,
        content TEXT NOT NULL,
        PRIMARY KEY (run, row_id, place),
        FOREIGN KEY (run, row_id) REFERENCES rows (run, row_id) ON DELETE CASCADE)""",
    # a claim is about the row as it stands, and goes when that is replaced; the digests say what it was judged against
    """CREATE TABLE claims (
        run TEXT NOT NULL,
        row_id TEXT NOT NULL,
        registry_digest TEXT NOT NULL,
        current_digest TEXT,
        earned_tier TEXT,
        derived_status TEXT,
        loss_metric TEXT,
        loss REAL,
        loss_share REAL,
        reasons TEXT NOT NULL,
        PRIMARY KEY (run, row_id),
        FOREIGN KEY (run, row_id) REFERENCES rows (run, row_id) ON DELETE CASCADE)""",
)


def _tables_of_the_store(connection: sqlite3.Connection) -> None:
    for statement in TABLES:
        connection.execute(statement)


def _certified_claims(connection: sqlite3.Connection) -> None:
    """What measuring again found; of a claim that was kept before nothing was."""
    connection.execute("ALTER TABLE claims ADD COLUMN certified INTEGER NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE claims ADD COLUMN replay TEXT")


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (_tables_of_the_store, _certified_claims)
"""Migration number n, counted from 1, makes version n of version n - 1. A released one is never edited."""


# ------------------------------------------------------------------------------------- upgrading


def upgrade(connection: sqlite3.Connection) -> bool:
    """Bring a database to this schema in one transaction.

    Parameters
    ----------
    connection : sqlite3.Connection
        In autocommit mode (``isolation_level=None``), to an empty database, to one of the published study, or to one
        of any earlier schema of this program, whole or with only some of its columns.

    Returns
    -------
    bool
        Whether anything had to be done; False means that nothing was written.

    Raises
    ------
    StorageError
        When the database is somebody else's, or of a newer schema; it is left as it was.
    sqlite3.Error
        When it is locked, the disk is full, or the like; it is left as it was.
    """
    if _up_to_date(connection):
        return False
    with transaction(connection):
        # another process may have upgraded it since: what is missing is looked up again under the lock
        for migration in MIGRATIONS[_recognised_version(connection) :]:
            migration(connection)
        for table, name, kind in _missing_columns(connection):
            connection.execute(f"ALTER TABLE {quoted(table)} ADD COLUMN {quoted(name)} {kind}")
        _sign(connection)
    return True


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Hold the write lock; commit at the end, or undo everything."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        _undo(connection)
        raise


def _undo(connection: sqlite3.Connection) -> None:
    # a full disk makes SQLite itself roll back; what fails here is undone from the journal when the file is next opened
    with contextlib.suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _up_to_date(connection: sqlite3.Connection) -> bool:
    connection.execute("BEGIN")  # version and tables as of one moment, though another process may be upgrading
    try:
        return _recognised_version(connection) == len(MIGRATIONS) and not _missing_columns(connection)
    finally:
        _undo(connection)


def _recognised_version(connection: sqlite3.Connection) -> int:
    """The schema's version; databases that this program must not touch are refused."""
    version, application = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")
    )
    if version > len(MIGRATIONS):
        raise StorageError(
            f"the database has schema {version}, this kvlab knows up to {len(MIGRATIONS)}; use the kvlab that wrote it",
            code="storage.newer-schema",
        )
    known = application == APPLICATION if version else not _tables(connection) or _has_published_table(connection)
    if version < 0 or not known:
        raise StorageError(
            "the database is another program's, neither a store of kvlab nor the published study's",
            code="storage.other-program",
        )
    return version


def _sign(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


# --------------------------------------------------------------------------- what a database has


def _missing_columns(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """Table, name and type of every column that there should be and is not."""
    needed = [("rows", *column) for column in sql_columns()]
    if _has_published_table(connection):
        needed += [(PUBLISHED_TABLE, *column) for column in published_columns()]
    present = {table: columns(connection, table) for table, _, _ in needed}
    return [(table, name, kind) for table, name, kind in needed if name.lower() not in present[table]]


def published_columns() -> list[tuple[str, str]]:
    """Name and type of the columns that the published study's table may lack: its 14 fields and two flags."""
    fields = [(name, kind) for name, kind in sql_columns() if BY_NAME[name].group == "mechanism"]
    return [*fields, *PUBLISHED_FLAGS]


def columns(connection: sqlite3.Connection, table: str) -> set[str]:
    """Names of a table's columns in lower case, as SQLite compares them; empty when there is no such table."""
    return {name.lower() for (name,) in connection.execute("SELECT name FROM pragma_table_xinfo(?)", (table,))}


def _has_published_table(connection: sqlite3.Connection) -> bool:
    return PUBLISHED_TABLE in _tables(connection)


def _tables(connection: sqlite3.Connection) -> set[str]:
    query = "SELECT lower(name) FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    return {name for (name,) in connection.execute(query)}


def quoted(name: str) -> str:
    """A name as an SQL identifier; only ever one of the catalogue or of this module."""
    return '"' + name.replace('"', '""') + '"'
