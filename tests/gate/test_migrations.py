import sqlite3
from contextlib import closing

import pytest

from gate.databases import checksum, dump, held, ingest, published, row, start
from kvlab.core.errors import StorageError
from kvlab.gate.catalogue import sql_columns
from kvlab.gate.store import StoreLocked, migrations, open_store
from kvlab.gate.store.ingest import stored_rows
from kvlab.gate.store.queries import query
from refusals import refused, refused_in_one_line

ROWS = 10_000


@pytest.fixture(scope="module", params=[0, 7, 16], ids=["v0", "half", "all columns"])
def old(request, tmp_path_factory):
    """Bytes of a published database with none, some and all of the mechanism columns."""
    return published(tmp_path_factory.mktemp("old") / "old.db", ROWS, request.param).read_bytes()


@pytest.fixture(scope="module")
def current(tmp_path_factory):
    """Bytes of a store with rows of its own."""
    path = tmp_path_factory.mktemp("current") / "current.db"
    with open_store(path, create=True) as store:
        ingest(store, [row(i, evidence=[{"n": i}]) for i in range(500)], "a")
    return path.read_bytes()


def copy(tmp_path, content):
    path = tmp_path / "copy.db"
    path.write_bytes(content)
    return path


def opened(path):
    """Open and close; how many changes that made."""
    with open_store(path) as store:
        return store.connection.total_changes


@pytest.mark.full
def test_an_old_database_is_upgraded_in_place_and_no_value_is_changed(old, tmp_path):
    path = copy(tmp_path, old)
    columns, count, before = checksum(path)
    assert count == ROWS
    opened(path)
    assert checksum(path, columns=columns) == (columns, ROWS, before)
    with closing(sqlite3.connect(path)) as connection:
        present = migrations.columns(connection, "benchmark_runs")
        assert {column for column, _ in migrations.published_columns()} <= present
        new = present - {column.lower() for column in columns}
        nulls = " AND ".join(f"{column} IS NULL" for column in new) or "TRUE"
        assert connection.execute(f"SELECT count(*) FROM benchmark_runs WHERE {nulls}").fetchone() == (ROWS,)


def test_sixteen_columns_make_a_published_database_whole():
    assert len(migrations.published_columns()) == 16


def test_the_second_opening_does_nothing(old, tmp_path):
    path = copy(tmp_path, old)
    opened(path)
    before = path.read_bytes()
    with open_store(path) as store:
        assert store.connection.total_changes == 0
        assert not migrations.upgrade(store.connection)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_current_store_is_left_alone_by_its_first_opening_too(current, tmp_path):
    path = copy(tmp_path, current)
    assert opened(path) == 0
    assert path.read_bytes() == current


def test_a_store_with_only_some_columns_is_completed(tmp_path, monkeypatch):
    path = tmp_path / "store.db"
    with monkeypatch.context() as earlier:
        earlier.setattr(migrations, "sql_columns", lambda: sql_columns()[:-5])
        with open_store(path, create=True) as store:
            assert len(migrations.columns(store.connection, "rows")) == len(sql_columns()) - 5 + 3
            store.connection.execute("INSERT INTO runs VALUES ('a', '')")
            store.connection.execute("INSERT INTO rows (run, row_id, kl, digest) VALUES ('a', 'x', 0.1, '')")
    columns, _, before = checksum(path, "rows")
    with open_store(path) as store:
        assert query(store, {"row_id": "x"})["kl"].to_list() == [0.1]
    assert checksum(path, "rows", columns)[2] == before
    assert opened(path) == 0


def test_a_column_that_the_catalogue_gains_changes_no_row(tmp_path, monkeypatch):
    path = tmp_path / "store.db"
    with open_store(path, create=True) as store:
        ingest(store, [row(1)], "a")
    monkeypatch.setattr(migrations, "sql_columns", lambda: [*sql_columns(), ("brand_new", "REAL")])
    with open_store(path) as store:
        assert "brand_new" in migrations.columns(store.connection, "rows")
        assert ingest(store, [row(1)], "a").same == 1


def test_names_are_compared_as_sqlite_compares_them(tmp_path):
    path = published(tmp_path / "x.db", 3, strange=False)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE benchmark_runs ADD COLUMN Mechanism TEXT DEFAULT 'kept'")
    before = checksum(path)
    opened(path)
    assert checksum(path, columns=before[0]) == before


def test_old_rows_are_found_but_nothing_is_made_of_what_is_no_number(tmp_path):
    path = published(tmp_path / "x.db", 700)
    with open_store(path) as store:
        found = query(store, {"run": "benchmark_runs"})
    assert len(found) == 700
    by_id = {line["row_id"]: line for line in found.rows(named=True)}
    whole = by_id["benchmark_runs:1"]
    assert (whole["device"], whole["throughput_tok_s"], whole["peak_memory_gb"]) == ("gpu_type 1", 1.1, 1.1)
    assert whole["earned_tier"] is None
    assert by_id["benchmark_runs:10"]["throughput_tok_s"] is None  # it failed
    odd = [by_id[f"benchmark_runs:{97 * k}"]["throughput_tok_s"] for k in range(1, 8)]
    assert odd == [None, None, None, None, -(2.0**63), None, None]


def test_a_published_table_may_lack_what_it_should_have(tmp_path):
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE benchmark_runs (throughput_tok_s REAL)")
        connection.execute("INSERT INTO benchmark_runs VALUES (5)")
    with open_store(path) as store:
        assert query(store).select("row_id", "throughput_tok_s").rows() == [("benchmark_runs:1", 5.0)]


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("statements", "code", "data"),
    [
        ("PRAGMA user_version = 99", "storage.newer-schema", "schema 99"),
        ("CREATE TABLE bookmarks (url TEXT)", "storage.other-program", ""),
        ("CREATE TABLE bookmarks (url TEXT); PRAGMA user_version = 1", "storage.other-program", ""),
        ("PRAGMA user_version = -1", "storage.other-program", ""),
        ("CREATE TABLE benchmark_runs (id); CREATE TABLE runs (mine)", "storage.sqlite", "table runs already exists"),
    ],
)
def test_what_is_not_ours_is_not_touched(tmp_path, statements, code, data):
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(statements)
    before = path.read_bytes()
    with refused_in_one_line(StorageError, code, path, data):
        opened(path)
    assert path.read_bytes() == before


# ------------------------------------------------------------------------- interrupted upgrades


def test_a_locked_database_is_not_upgraded(tmp_path):
    path = published(tmp_path / "x.db", 10)
    before = path.read_bytes()
    with held(path), refused(StoreLocked, None, path, "0.2 s"):
        opened_soon(path)
    assert path.read_bytes() == before
    opened(path)
    assert dump(path)[0] == (len(migrations.MIGRATIONS),)


def opened_soon(path):
    with open_store(path, timeout=0.2):
        raise AssertionError("opened")


def test_a_disk_that_is_full_anywhere_in_an_upgrade_changes_nothing(tmp_path):
    path = published(tmp_path / "x.db", 10)
    before, content, failed = dump(path), path.read_bytes(), 0
    pages = len(content) // page_size(path)
    while True:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA max_page_count = {pages + failed}")
            try:
                migrations.upgrade(connection)
                break
            except sqlite3.OperationalError as error:
                assert error.sqlite_errorcode == sqlite3.SQLITE_FULL
            assert not connection.in_transaction
        assert dump(path) == before and path.read_bytes() == content
        failed += 1
    assert failed >= 4  # a page for each table at least
    opened(path)
    assert checksum(path, columns=[*before[2]["benchmark_runs"][0]]) == before[2]["benchmark_runs"]


def page_size(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA page_size").fetchone()[0]


def test_the_steps_of_an_upgrade_stand_or_fall_together(tmp_path, monkeypatch):
    path = published(tmp_path / "x.db", 10)
    before = dump(path)

    def fails(connection):
        connection.execute("CREATE TABLE half (way)")
        connection.execute("UPDATE benchmark_runs SET model = 'spoilt'")
        raise sqlite3.OperationalError("no such function: of_the_future")

    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, fails))
    with refused(StorageError, "storage.sqlite", "of_the_future"):
        opened(path)
    assert dump(path) == before


def test_a_later_migration_runs_once_and_alone(tmp_path, monkeypatch):
    path = published(tmp_path / "x.db", 10)
    opened(path)
    before = checksum(path)
    ran = []

    def later(connection):
        ran.append(connection.execute("PRAGMA user_version").fetchone()[0])
        connection.execute("CREATE TABLE later (x)")

    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, later))
    opened(path), opened(path)
    assert ran == [len(migrations.MIGRATIONS) - 1]
    assert checksum(path) == before and dump(path)[0] == (len(migrations.MIGRATIONS),)


KILLED = """
import os, signal, sys
from kvlab.gate.store import migrations
from kvlab.gate.store import open_store
migrations._sign = lambda connection: os.kill(os.getpid(), signal.SIGKILL)
with open_store(sys.argv[1]):
    pass
"""


def test_a_killed_upgrade_is_none(tmp_path):
    path = published(tmp_path / "x.db", 10)
    before = dump(path)
    with start(KILLED, path) as other:
        assert other.wait() == -9, other.stderr.read()
    assert dump(path) == before
    opened(path)
    assert checksum(path, columns=before[2]["benchmark_runs"][0]) == before[2]["benchmark_runs"]


def test_an_upgraded_database_takes_rows(tmp_path):
    path = published(tmp_path / "x.db", 10)
    with open_store(path) as store:
        ingest(store, [row(1)], "a")
        assert [one.values["row_id"] for one in stored_rows(store, "a")] == ["r1"]
        assert len(query(store)) == 11
