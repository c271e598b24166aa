"""A save that does not end: whoever opens the path finds the old snapshot or the new one, never neither."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvlab.core.errors import StorageError
from kvlab.kvstore.snapshot import read, write
from kvstore.snapshot import making

OLD, NEW = 2, 5  # chunks


class Steps:
    """Calls something at one of the steps of a save: a write to the file, an fsync, a rename, a folder made."""

    def __init__(self, stop: int, what: Callable[[], None]):
        self.stop, self.what, self.taken = stop, what, []

    def __call__(self, name: str, real: Callable, half: Callable | None = None):
        def step(*args, **kwargs):
            self.taken.append(name)
            if len(self.taken) - 1 == self.stop:
                if half is not None:
                    half(*args)
                self.what()
            return real(*args, **kwargs)

        return step


def half_written(file, data: bytes) -> None:
    """What a full disk or a killed process leaves of a write."""
    file.write(data[: len(data) // 2])
    file.flush()


@contextmanager
def stepping(stop: int, what: Callable[[], None]):
    steps = Steps(stop, what)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "_put", steps("write", write._put, half_written))
        for name in ("fsync", "replace", "mkdir"):
            patch.setattr(os, name, steps(name, getattr(os, name)))
        yield steps


def save(path: Path, chunks: int = NEW) -> None:
    making.written(path, chunks=chunks)


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list[str]:
    """The steps of an undisturbed save."""
    path = tmp_path_factory.mktemp("steps") / "s"
    with stepping(-1, lambda: None) as found:
        save(path)
    return found.taken


@pytest.fixture(scope="module")
def wanted(tmp_path_factory) -> dict[int, bytes]:
    """What the file may hold afterwards."""
    path = tmp_path_factory.mktemp("wanted") / "s"
    found = {}
    for chunks in (OLD, NEW):
        save(path, chunks)
        found[chunks] = path.read_bytes()
    return found


def test_the_file_is_durable_before_it_has_its_name_and_the_name_before_save_returns(steps):
    assert steps[-3:] == ["fsync", "replace", "fsync"]
    assert set(steps[:-3]) <= {"mkdir", "write"} and steps.count("write") == NEW + 4 + 1


ERRORS = {
    "full": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "broken": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "interrupted": KeyboardInterrupt,
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("old", [True, False])
def test_an_error_at_any_step(tmp_path, steps, wanted, name, old):
    path = tmp_path / "s"
    for stop in range(1, len(steps)):  # the first makes the folder that is there, whatever mkdir says
        path.unlink(missing_ok=True)
        if old:
            save(path, OLD)

        def fail():
            raise ERRORS[name]()

        with stepping(stop, fail), pytest.raises((StorageError, KeyboardInterrupt)) as caught:
            save(path)
        if stop == len(steps) - 1:  # the name of a file that is whole and in place
            assert path.read_bytes() == wanted[NEW]
        else:
            assert path.read_bytes() == wanted[OLD] if old else not path.exists()
        assert [p.name for p in tmp_path.iterdir()] == (["s"] if path.exists() else [])
        if name != "interrupted":
            assert os.strerror(ERRORS[name]().errno).lower() in str(caught.value).lower() or name == "full"
            assert (caught.value.code == "storage.not-durable") == (stop == len(steps) - 1)


def test_a_file_system_that_cannot_sync_folders_is_no_error(tmp_path, steps):
    def fail():
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with stepping(len(steps) - 1, fail):
        save(tmp_path / "s")
    with read.open(tmp_path / "s") as snapshot:
        assert snapshot.verify() == []


def in_a_child(what: Callable[[], None]) -> int:
    """Run it in a process of its own, which never comes back; its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        what()
        os._exit(0)
    finally:
        os._exit(1)


def killed(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_killed_at_every_step(tmp_path, steps, wanted):
    path, found = tmp_path / "s", []
    for stop in range(len(steps)):
        save(path, OLD)

        def dying(stop=stop):
            with stepping(stop, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                save(path)

        assert killed(in_a_child(dying))
        found.append(path.read_bytes())
        with read.open(path) as snapshot:
            assert snapshot.verify() == []
    assert found == [wanted[OLD]] * (len(steps) - 1) + [wanted[NEW]]
    save(path)
    left = [p for p in tmp_path.iterdir() if p != path]
    assert len(left) == len(steps) - 2, "of every one that was at work on its file; it may be at work still"
    for file in left:
        age(file, days=2)
    save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["s"], "the next save sweeps up what is old"


def age(path: Path, days: float) -> None:
    at = time.time() - days * 24 * 60 * 60
    os.utime(path, (at, at))


def test_only_what_is_old_and_of_this_name_is_swept_up(tmp_path):
    random = "0123456789abcdef"
    kept = {f".s.{random}.tmp": 0.5, f".s.t.{random}.tmp": 2, ".s.mine.tmp": 2, f".s.{random}": 2, f"s.{random}.tmp": 2}
    for name, days in kept.items():
        (tmp_path / name).write_bytes(b"part of a snapshot")
        age(tmp_path / name, days)
    (tmp_path / f".s.{random[::-1]}.tmp").write_bytes(b"part of a snapshot")
    age(tmp_path / f".s.{random[::-1]}.tmp", days=2)
    save(tmp_path / "s")
    assert {p.name for p in tmp_path.iterdir()} == {"s", *kept}


def test_who_else_saves_under_the_name_is_not_disturbed(tmp_path, wanted, monkeypatch):
    """Two containers that share a folder have equal process ids, and know nothing of one another."""
    path = tmp_path / "s"
    monkeypatch.setattr(os, "getpid", lambda: 7)

    def payloads():
        for number in range(OLD):
            save(path)
            assert path.read_bytes() == wanted[NEW]
            yield making.chunk(number)

    source = making.source(OLD * making.GEOMETRY.chunk_tokens)
    write.save(path, write.SnapshotSource(source.identity, payloads(), source.ledger, source.tokens))
    assert path.read_bytes() == wanted[OLD] and [p.name for p in tmp_path.iterdir()] == ["s"]


def test_threads_of_one_process(tmp_path, wanted):
    path = tmp_path / "s"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: save(path, (OLD, NEW)[n % 2]), range(40)))
    assert path.read_bytes() in wanted.values() and [p.name for p in tmp_path.iterdir()] == ["s"]


def test_who_may_read_it_is_as_for_any_file(tmp_path):
    before = os.umask(0o027)
    try:
        save(tmp_path / "s")
    finally:
        os.umask(before)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o640


def test_killed_at_any_time(tmp_path, wanted):
    path, chance = tmp_path / "s", random.Random(0)
    save(path, OLD)

    def saving():
        while True:
            save(path, chance.choice((OLD, NEW)))

    for _ in range(25):
        pid = in_a_child(saving)
        time.sleep(chance.uniform(0.001, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert killed(pid)
        assert path.read_bytes() in wanted.values()


def test_readers_beside_a_writer_see_whole_snapshots(tmp_path):
    path = tmp_path / "s"
    save(path, OLD)

    def saving():
        while True:
            save(path, OLD)
            save(path, NEW)

    pid, seen = in_a_child(saving), set()
    try:
        end = time.monotonic() + 20  # a bound for a machine that has other work
        while time.monotonic() < end and seen != {OLD, NEW}:
            with read.open(path) as snapshot:
                assert snapshot.verify() == []
                seen.add(len(snapshot.records))
    finally:
        os.kill(pid, signal.SIGKILL)
        killed(pid)
    assert seen == {OLD, NEW}


@pytest.mark.parametrize("missing", [True, False])
def test_a_source_that_fails_midway(tmp_path, wanted, missing):
    path = tmp_path / "s"
    if not missing:
        save(path, OLD)

    def payloads():
        yield from making.chunks(3)
        raise RuntimeError("the pager broke down")

    source = making.source(NEW * making.GEOMETRY.chunk_tokens)
    with pytest.raises(RuntimeError):
        write.save(path, write.SnapshotSource(source.identity, payloads(), source.ledger, source.tokens))
    assert not path.exists() if missing else path.read_bytes() == wanted[OLD]
    assert [p.name for p in tmp_path.iterdir()] == ([] if missing else ["s"])
