"""Nothing leaves the log unseen, nothing enters it twice, and a killed writer costs nobody anything."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvlab.codecs.stream.seal import Key
from kvlab.core.errors import StorageError, UserError
from kvlab.core.recipe import canonical
from kvlab_mechanisms.ledger.checkpoint import Checkpoint, LedgerBroken, advance, verify
from kvlab_mechanisms.ledger.jobs import digest_of, enter, entry_of, number_of, others
from kvlab_mechanisms.ledger.log import LogEntry, ReadLog, append, decoded, encoded, read
from kvlab_mechanisms.ledger.merkle import Tree
from refusals import refused

pytestmark = pytest.mark.full


def entry(n: int, **changes) -> LogEntry:
    told = {"job": f"rule n={n}", "inputs": {}, "outputs": {f"results/{n}": f"{n:064x}"}, "params": "0" * 64}
    return LogEntry(**(told | {"versions": {"kvlab": "1"}} | changes))


def lines(count: int) -> list[bytes]:
    return [encoded(entry(n)) for n in range(count)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "log.jsonl"


def test_a_log_read_again_is_the_log(path):
    written = [entry(n) for n in range(5)]
    for one in written[:3]:
        assert append([one], path) == 0
    append(written[3:], path)
    found = read(path)
    assert found.entries() == written and found.torn == 0
    assert found.tree().root() == Tree(map(leaf_of, written)).root()


def leaf_of(one: LogEntry) -> bytes:
    from kvlab.codecs.stream.tree import leaf

    return leaf(encoded(one))


MANGLED = st.sampled_from(["delete", "swap", "cut", "insert", "edit", "bit"])


@given(st.integers(2, 12), MANGLED, st.data())
def test_whatever_is_done_to_the_past_is_found(count, how, data):
    whole = lines(count)
    checkpoint = Checkpoint.of(ReadLog(None, tuple(whole), 0).tree())
    at = data.draw(st.integers(0, count - 1))
    other = data.draw(st.integers(0, count - 1))
    changed = list(whole)
    if how == "delete":
        del changed[at]
    elif how == "swap":
        changed[at], changed[other] = changed[other], changed[at]
    elif how == "cut":
        del changed[at:]
    elif how == "insert":
        changed.insert(at, encoded(entry(99)))
    elif how == "edit":
        changed[at] = encoded(entry(at, params="1" * 64))
    else:
        bit = data.draw(st.integers(0, 8 * len(whole[at]) - 1))
        flipped = bytearray(whole[at])
        flipped[bit // 8] ^= 1 << bit % 8
        assume(b"\n" not in flipped)
        changed[at] = bytes(flipped)
    assume(changed != whole)
    later = lines(20)[count : count + data.draw(st.integers(0, 5))]
    with pytest.raises(LedgerBroken) as caught:
        verify(ReadLog("log", (*changed, *later), 0), checkpoint)
    assert caught.value.code == ("ledger.cut" if len(changed) + len(later) < count else "ledger.other-entries")
    assert len(verify(ReadLog("log", (*whole, *later), 0), checkpoint)) == count + len(later)


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_a_line_is_what_the_ledger_writes_or_it_is_refused(junk):
    with refused(StorageError, "storage.no-entry", "line 1"):
        decoded(junk, "line 1")


def test_one_entry_has_one_spelling():
    right = lines(1)[0]
    assert right == canonical(entry(0)).encode()
    assert encoded(decoded(right, "here")) == right
    wrong = [right + b" ", b" " + right, right.replace(b":", b": ", 1), right[:-1] + b',"job":"x"}', b"[]", b"1", b""]
    wrong += [right.replace(b'"0000', b'"000G', 1), right.replace(b"}}", b'},"x":1}', 1), b'{"job":NaN}']
    for line in wrong:
        with pytest.raises(StorageError):
            decoded(line, "here")
    with refused(UserError, "user.no-digest", "results/0", "'abc'", "64 hexadecimal digits"):
        encoded(entry(0, outputs={"results/0": "abc"}))


def test_what_stands_in_one_field_passes_for_no_other():
    a, b = entry(0, job="a|b", params="0" * 64), entry(0, job='a","params":"' + "0" * 64)
    assert len({encoded(a), encoded(b), encoded(entry(0, job="a\nb"))}) == 3
    assert b"\n" not in encoded(entry(0, job="a\nb"))


@given(st.integers(1, 400))
def test_a_torn_last_line_is_told_and_taken_away(tmp_path_factory, kept):
    path = tmp_path_factory.mktemp("torn") / "log.jsonl"
    append([entry(0)], path)
    data, torn = path.read_bytes(), (lines(2)[1] + b"\n")[:kept]
    assume(len(torn) == kept and not torn.endswith(b"\n"))
    path.write_bytes(data + torn)
    found = read(path)
    assert (len(found.lines), found.torn) == (1, kept)
    with refused(UserError, "user.torn-line", path, f"{kept} bytes"):
        advance(found, None)
    assert append([entry(1)], path) == kept
    assert read(path).entries() == [entry(0), entry(1)]


def test_a_torn_line_alone_and_a_long_one(path):
    path.parent.mkdir()
    path.write_bytes(b"x" * 200_000)
    assert append([entry(0)], path) == 200_000
    path.write_bytes(path.read_bytes() + b"y" * 200_000)
    assert append([entry(1)], path) == 200_000
    assert read(path).entries() == [entry(0), entry(1)]


WRITER = """
import sys
from kvlab_mechanisms.ledger.log import LogEntry, append
who, path = sys.argv[1:]
for n in range(50):
    outputs = {f"results/{who}/{n}": "0" * 64 for n in range(20)}
    append([LogEntry(job=f"{who} {n}", inputs={}, outputs=outputs, params="0" * 64, versions={})], path)
"""


def test_writers_at_once_lose_nothing(path):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(who), str(path)]) for who in range(3)]
    assert [one.wait(timeout=120) for one in writers] == [0, 0, 0]
    jobs = [one.job for one in read(path).entries()]
    assert sorted(jobs) == sorted(f"{who} {n}" for who in range(3) for n in range(50))
    for who in range(3):
        assert [job for job in jobs if job.startswith(f"{who} ")] == [f"{who} {n}" for n in range(50)]


def test_a_log_that_cannot_be_written_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        append([entry(0)], tmp_path / "file" / "log.jsonl")
    assert all(part in str(caught.value) for part in (str(tmp_path / "file" / "log.jsonl"), "File exists"))
    with refused(StorageError, "storage.no-ledger", tmp_path / "none"):
        read(tmp_path / "none")


def test_a_checkpoint_goes_on_from_the_last_one(path, tmp_path):
    append([entry(0), entry(1)], path)
    first = advance(read(path), None)
    first.write(tmp_path / "c.json")
    assert Checkpoint.read(tmp_path / "c.json") == first
    append([entry(2)], path)
    second = advance(read(path), first)
    assert second.size == 3 and second.root != first.root
    path.write_bytes(b"".join(one + b"\n" for one in lines(5)[1:]))
    with refused(LedgerBroken, "ledger.other-entries", path):
        advance(read(path), second)


def test_a_signed_checkpoint_is_of_one_key_size_and_root(tmp_path):
    key, tree = Key(b"k" * 32), Tree(map(leaf_of, map(entry, range(3))))
    signed = Checkpoint.of(tree, key)
    signed.refuse_unsigned(key)
    forged = [Checkpoint(2, signed.root, signed.signature), Checkpoint(3, "0" * 64, signed.signature)]
    for wrong, with_key in [(one, key) for one in (*forged, Checkpoint.of(tree))] + [(signed, Key(b"l" * 32))]:
        with refused(LedgerBroken, "ledger.signature"):
            wrong.refuse_unsigned(with_key)
    for text in ("{}", "[]", '{"size": 1, "root": "x"}', '{"size": -1, "root": "%s"}' % ("0" * 64), "{"):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(StorageError) as caught:
            Checkpoint.read(tmp_path / "c.json")
        assert str(tmp_path / "c.json") in str(caught.value)


def test_the_entry_of_a_job_is_the_same_whenever_it_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("in", "1"), ("out/a", "2"), ("out/b/c", "3"), ("out/__pycache__/x", "4")):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    made = entry_of("job", ["in"], ["out"], ["--flag", {"a": 1}])
    assert made.inputs == {"in": digest_of("in")}
    (tmp_path / "out/__pycache__/x").write_text("5")
    assert made == entry_of("job", ["in"], ["out"], ["--flag", {"a": 1}])
    assert enter([made]) == (1, 0) and enter([made]) == (0, 0), "work that came out as before"
    (tmp_path / "out/b/c").write_text("other")
    assert others(read().entries()) == ["out"]
    with refused(UserError, "user.changed-output", "out ", "entry 0"):
        number_of(read().entries(), "out")
    assert enter([entry_of("job", ["in"], ["out"], [])]) == (1, 0)
    assert others(read().entries()) == [] and number_of(read().entries(), "out") == 1
    with refused(UserError, "user.not-in-ledger", " in;"):
        number_of(read().entries(), "in")
