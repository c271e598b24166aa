import sqlite3
import time
from contextlib import closing

import pytest

from gate.databases import dump, held, ingest, published, row, start
from kvlab.core.errors import StorageError, UserError
from kvlab.gate.store import StoreLocked, open_store
from kvlab.gate.store.queries import query
from refusals import refused_in_one_line


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "store.db"
    with open_store(path, create=True) as store:
        ingest(store, [row(1), row(2)], "a")
    return path


def not_opened(path, code=None, *data, error=StorageError, **options):
    with refused_in_one_line(error, code, *data) as caught, open_store(path, **options):
        raise AssertionError("opened")
    assert isinstance(caught.value, UserError)


def test_a_store_is_made_only_on_request_and_with_its_folder(tmp_path):
    path = tmp_path / "a" / "b" / "odd name ?#%20.db"
    not_opened(path, "storage.no-store", path)
    assert not path.parent.exists()
    with open_store(path, create=True):
        pass
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    not_opened(tmp_path / "file" / "x.db", "storage.cannot-write", tmp_path / "file", create=True)


def test_it_logs_ahead_and_holds_to_its_references(path):
    with open_store(path) as store:
        assert store.connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        with pytest.raises(sqlite3.IntegrityError), store.transaction() as connection:
            connection.execute("INSERT INTO evidence VALUES ('no', 'such row', 0, '{}')")


@pytest.mark.parametrize("content", [b"not a database at all, but long enough" * 9, b"SQLite format 3\0" + b"x" * 200])
def test_what_is_no_database_is_said(tmp_path, content):
    path = tmp_path / "x.db"
    path.write_bytes(content)
    not_opened(path, "storage.no-database", path)
    assert path.read_bytes() == content


def test_a_folder_is_no_store(tmp_path):
    not_opened(tmp_path, "storage.no-file", tmp_path)


def test_an_empty_file_is_no_store_and_stays_empty(tmp_path):
    """SQLite takes it for a database without tables, and would write into it."""
    path = tmp_path / "empty.db"
    path.touch()
    not_opened(path, "storage.empty", path, "kvlab gate ingest")
    assert path.read_bytes() == b""
    with open_store(path, create=True) as store:
        assert len(query(store)) == 0


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failure_inside_undoes_everything(path, failure):
    before = dump(path)
    with open_store(path) as store:
        with pytest.raises(failure), store.transaction() as connection:
            connection.execute("DELETE FROM rows")
            raise failure
        assert not store.connection.in_transaction
        assert len(query(store)) == 2
    assert dump(path) == before


def test_a_mistake_in_a_statement_is_not_blamed_on_the_disk(path):
    with open_store(path) as store, pytest.raises(sqlite3.ProgrammingError):
        store.select("SELECT ?", ())


# --------------------------------------------------------------------------------------- locked


def test_a_store_that_another_process_holds_is_said_within_the_timeout(path):
    before = dump(path)
    with held(path):
        began = time.monotonic()
        with refused_in_one_line(StoreLocked, None, path), open_store(path, timeout=0.2) as store:
            ingest(store, [row(3)], "a")
        assert 0.2 <= time.monotonic() - began < 3
    assert dump(path) == before


def test_readers_go_on_beside_a_writer_and_a_second_writer_waits_no_longer_than_asked(path):
    with open_store(path) as first, first.transaction() as connection:
        connection.execute("DELETE FROM rows")
        with open_store(path, timeout=0.1) as second:
            assert len(query(second)) == 2
            with pytest.raises(StoreLocked), second.transaction():
                pass


def test_a_store_that_readers_keep_from_its_log_does_without(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("PRAGMA journal_mode = DELETE")
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM rows").fetchone() == (2,)
        with open_store(path, timeout=0.1) as store:
            assert store.connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
            assert len(query(store)) == 2
    with open_store(path) as store:
        assert store.connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_an_old_database_that_is_being_read_is_not_upgraded_under_its_reader(tmp_path):
    path = published(tmp_path / "x.db", 3)
    before = dump(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM benchmark_runs").fetchone()
        not_opened(path, None, path, error=StoreLocked, timeout=0.1)
    assert dump(path) == before


# ----------------------------------------------------------------------------------------- full


SHORT_OF_ROOM = """
import resource, sys
from gate.databases import ingest, row
from kvlab.core.errors import StorageError
from kvlab.gate.store import open_store
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
try:
    with open_store(sys.argv[1]) as store:
        ingest(store, [row(i, mechanism_notes="x" * 999) for i in range(500)], "b")
except StorageError as error:
    print(error)
"""


@pytest.mark.full
@pytest.mark.parametrize("room", [0, 200_000])
def test_a_file_that_cannot_grow_is_said_and_loses_nothing(path, room):
    before = dump(path)
    with start(SHORT_OF_ROOM, path, room) as other:
        told, complaint = other.communicate()
    assert told.count("\n") == 1 and "cannot use" in told, complaint
    assert dump(path) == before
    with open_store(path) as store:
        assert len(query(store)) == 2
