"""Only a file is ever written over: devices, pipes, sockets and folders are left as they are."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from kvlab.cli.main import main
from kvlab.core.errors import StorageError
from kvlab.core.output_paths import absence
from kvlab.core.records import atomic, write_text
from refusals import refused_in_one_line


def refuses(path: Path | str, code: str, *data: object) -> None:
    with refused_in_one_line(StorageError, code, *data), atomic(path):
        pytest.fail("nothing is written")


def test_a_device_stays_a_device():
    refuses("/dev/full", "storage.no-file", "/dev/full", "device")
    refuses("/dev/null", "storage.no-file", "device")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_link_counts_as_what_it_leads_to(tmp_path):
    (tmp_path / "link").symlink_to("/dev/null")
    refuses(tmp_path / "link", "storage.no-file", "device")
    assert (tmp_path / "link").is_symlink()


def test_a_pipe_and_a_socket_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    refuses("pipe", "storage.no-file", "a pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        refuses("socket", "storage.no-file", "a socket")
    assert sorted(os.listdir()) == ["pipe", "socket"]


@pytest.mark.parametrize("path", [".", "..", "folder", "folder/", "new/", "folder/.", "folder/..", "/"])
def test_a_folder_is_no_file(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    refuses(path, "storage.no-file", "a folder")
    assert os.listdir() == ["folder"]


@pytest.mark.parametrize("path", ["", "x\0y"])
def test_no_path_at_all(path):
    refuses(path, "storage.no-path", repr(path))
    if not path:
        refuses(Path(path), "storage.no-file", "a folder")


def test_a_file_is_replaced_and_a_new_one_made(tmp_path):
    for text in ("old", "new"):
        write_text(tmp_path / "in" / "file", text)
        assert (tmp_path / "in" / "file").read_text() == text


@pytest.mark.parametrize(
    "line",
    [
        "init --model models/reference --out {out}",
        "measure models/reference --text README.md --json {out}",
        "calibrate --model models/reference --out {out}",
        "step corpus --out {out}",
        "gate check README.md --out {out}",
    ],
)
@pytest.mark.parametrize(("out", "kind"), [("/dev/full", "a device"), ("docs", "a folder"), ("docs/", "a folder")])
def test_the_command_line_refuses_it_before_anything_runs(root, monkeypatch, capsys, line, out, kind):
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit) as left:
        main(line.format(out=out).split())
    told = capsys.readouterr().err
    assert left.value.code == 2 and told.count("\n") == 1 and f"cannot write {out}: it is {kind}" in told


def test_a_path_through_a_file_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    Path("away").symlink_to("nowhere")
    refuses("file/new", "storage.no-folder", "file/new", ": file ")
    refuses("file/deep/er/new", "storage.no-folder", ": file ")
    refuses("away/new", "storage.no-folder", ": away ")
    assert Path("file").read_text() == "kept" and sorted(os.listdir()) == ["away", "file"]


def test_what_is_not_there_is_told_from_what_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("it's a file").write_text("")
    Path("dangling").symlink_to("no where")
    Path("loop").symlink_to("loop")
    assert absence("file") is None and absence("it's a file") is None and absence(".") is None
    assert absence("nothing") == absence("no/thing") == "no such file"
    assert absence("dangling") == "it is a link to no where, which is not there"
    assert absence("loop") == "it is a link that leads to itself"
    assert absence("file/x") == "no such file, as a part of the path is no folder"
    assert absence("x" * 300) == "File name too long" and "null" in absence("a\0b")
    monkeypatch.setattr(os, "stat", lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert absence("file") == "Permission denied"
