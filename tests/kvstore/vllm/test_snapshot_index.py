"""The snapshot that holds most of a prompt is found, and each is read once."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import StorageError
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason
from kvlab.kvstore.snapshot.write import save
from kvlab.kvstore.vllm.miss_reasons import MissReason
from kvlab.kvstore.vllm.snapshot_index import Match, SnapshotIndex
from kvstore.snapshot import making
from tiers import examples

SIZE = making.GEOMETRY.chunk_tokens
IDENTITY = making.identity()


def put(path, tokens: list[int], **changes) -> None:
    save(path, replace(making.source(len(tokens), **changes), tokens=tokens))


def common(ours: list[int], theirs: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))


@given(st.lists(st.lists(st.integers(0, 1), min_size=SIZE, max_size=24), min_size=1, max_size=5), st.data())
@examples(40)
def test_no_snapshot_of_the_folder_holds_more(tmp_path_factory, contexts, data):
    folder = tmp_path_factory.mktemp("shelf")
    for number, tokens in enumerate(contexts):
        put(folder / str(number), tokens)
    prompt = data.draw(st.one_of(st.sampled_from(contexts), st.lists(st.integers(0, 1), max_size=24)))
    found, reasons = SnapshotIndex(folder).find(IDENTITY, prompt)
    longest = max(common(prompt, tokens[: len(tokens) // SIZE * SIZE]) // SIZE * SIZE for tokens in contexts)
    assert (found.tokens if found else 0) == longest
    assert found is not None or [reason.code for reason in reasons] == [Code.PREFIX]


def test_a_file_is_opened_once_and_again_when_it_is_another(tmp_path, monkeypatch):
    opened, plain = [], read.open
    monkeypatch.setattr(read, "open", lambda path: opened.append(path.name) or plain(path))
    shelf = SnapshotIndex(tmp_path)
    put(tmp_path / "a", making.tokens(12))
    put(tmp_path / "b", making.tokens(20))
    for _ in range(3):
        assert shelf.find(IDENTITY, making.tokens(40))[0] == Match(tmp_path / "b", 20)
    assert opened == ["a", "b"]
    put(tmp_path / "b", making.tokens(8))
    assert shelf.find(IDENTITY, making.tokens(40))[0] == Match(tmp_path / "a", 12)
    (tmp_path / "a").unlink()
    assert shelf.find(IDENTITY, making.tokens(40))[0] == Match(tmp_path / "b", 8)
    assert opened == ["a", "b", "b"]


def test_what_was_found_damaged_is_not_offered_until_it_is_another_file(tmp_path):
    shelf, tokens = SnapshotIndex(tmp_path), making.tokens(12)
    put(tmp_path / "a", tokens)
    assert shelf.find(IDENTITY, tokens)[0]
    shelf.spoil(tmp_path / "a", [SnapshotReason(Code.CHUNK_CHECKSUM, "damaged")])
    match, reasons = shelf.find(IDENTITY, tokens)
    assert match is None and [reason.code for reason in reasons] == [Code.CHUNK_CHECKSUM]
    put(tmp_path / "a", tokens)
    assert shelf.find(IDENTITY, tokens)[0] == Match(tmp_path / "a", 12)


def test_a_disk_that_does_not_answer_hides_a_file_for_that_moment_alone(tmp_path, monkeypatch):
    shelf, tokens = SnapshotIndex(tmp_path), making.tokens(12)
    put(tmp_path / "a", tokens)
    with monkeypatch.context() as busy:
        busy.setattr(read, "open", Mock(side_effect=StorageError("too many open files")))
        match, reasons = shelf.find(IDENTITY, tokens)
    assert match is None and [reason.code for reason in reasons] == [MissReason.STORAGE]
    assert shelf.find(IDENTITY, tokens)[0] == Match(tmp_path / "a", 12)


def test_every_kind_of_reason_is_given_once(tmp_path):
    for number in range(3):
        put(tmp_path / f"model{number}", making.tokens(8), model_hash="another")
        put(tmp_path / f"salt{number}", making.tokens(8), salt="another")
        (tmp_path / f"text{number}").write_text("nothing")
        put(tmp_path / f"other{number}", [9] * 8)
    match, reasons = SnapshotIndex(tmp_path).find(IDENTITY, making.tokens(8))
    codes = {Code.MODEL, Code.SALT, Code.NOT_A_SNAPSHOT, Code.PREFIX}
    assert match is None and {reason.code for reason in reasons} == codes and len(reasons) == len(codes)


def test_hidden_files_and_folders_and_no_folder_are_nothing(tmp_path):
    (tmp_path / ".half.1.tmp").mkdir()
    (tmp_path / ".hidden").write_text("nothing")
    (tmp_path / "folder").mkdir()
    assert SnapshotIndex(tmp_path).find(IDENTITY, making.tokens(8)) == (None, [])
    assert SnapshotIndex(tmp_path / "nowhere").find(IDENTITY, making.tokens(8)) == (None, [])
