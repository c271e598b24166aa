"""The file of a codec and the file of a cache: content decides what a file is, and the wrong one is one true line."""

from __future__ import annotations

import json

import pytest

from kvlab.cli import main as cli
from kvlab.core.filekind import CACHES, CODED, FRONT, is_tensors, kind_of
from refusals import refused, refused_line

TEXT = "a cache that is kept " * 12


@pytest.fixture(scope="module")
def files(tiny_model, tmp_path_factory):
    """A codec's file, and a snapshot, a coded cache and an archive under a codec's name; of the tiny model."""
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "text.txt").write_text(TEXT)
    codec = folder / "int4.kv"
    cli.main(["calibrate", "--model", str(tiny_model), "--codec", "int", "--out", str(codec)])
    text = ("--model", str(tiny_model), "--text", str(folder / "text.txt"))
    cli.main(["snapshot", "save", str(folder / "context.kvs"), *text, "--chunk-tokens", "16"])
    (folder / "moved.kv").write_bytes((folder / "context.kvs").read_bytes())
    for magic in CACHES:
        (folder / f"{magic.hex()}.kv").write_bytes(magic + bytes(64))
    return folder


def test_every_kind_is_known_by_its_first_bytes(files):
    seen = {path.name: kind_of(path.read_bytes()[:FRONT]) for path in files.iterdir()}
    assert "snapshot" in seen["context.kvs"] and seen["moved.kv"] == seen["context.kvs"]
    assert "calibrate" in seen["int4.kv"] and seen["text.txt"] is None


@pytest.mark.parametrize("verb", ["measure", "encode", "snapshot save", "eval"])
def test_a_cache_is_no_codec(files, tiny_model, line, verb):
    text = files / "text.txt"
    words = {
        "measure": ("measure", tiny_model, "--text", text, "--context", 16, "--eval", 8, "--calibration"),
        "encode": ("encode", "--model", tiny_model, "--text", text, "--out", files / "x.kvls", "--recipe"),
        "snapshot save": ("snapshot", "save", files / "x.kvs", "--model", tiny_model, "--text", text, "--recipe"),
        "eval": (
            "eval",
            "--model",
            tiny_model,
            "--task",
            "ruler_v1",
            "--engine",
            "hf",
            "--out",
            files / "x",
            "--recipe",
        ),
    }[verb]
    for path in (files / "context.kvs", *files.glob("*.kv")):
        if path.name != "int4.kv":
            refused_line(line(*words, path), f"{path} is a", "not the file of a codec; give what `kvlab calibrate`")
    assert not list(files.glob("x*"))


def test_a_codec_is_no_cache(files, tiny_model, line):
    codec, text = files / "int4.kv", files / "text.txt"
    refused_line(line("snapshot", "inspect", codec), "this is a file of tensors")
    refused_line(
        line("decode", "--model", tiny_model, "--recipe", codec, "--stream", codec, "--out", text), "of tensors"
    )
    refused_line(line("inspect", "--stream", files / "context.kvs"), "this is a snapshot")
    words = ("snapshot", "restore", codec, "--model", tiny_model, "--text", text, "--mode", "consume")
    refused_line(line(*words), "this is a file of tensors")
    code, out, _ = line("snapshot", "verify", codec, "--json")
    (found,) = json.loads(out).values()
    assert code == 2 and [reason["code"] for reason in found["reasons"]] == ["not_a_snapshot"]


def test_a_codecs_file_that_reads_nothing_is_described(files, line):
    code, said, err = line("inspect", "--stream", files / "int4.kv")
    assert code == 0 and "K: int at 4 bits, before its rotary embedding" in said and "not calibrated" in said, err
    (files / "secret").write_bytes(bytes(32))
    refused_line(line("inspect", "--stream", files / "int4.kv", "--key", files / "secret"), "nobody signs")


def test_a_cache_of_123_heads_is_not_taken_for_tensors():
    assert not is_tensors(CODED + bytes(4) + b"{" + bytes(7)) and is_tensors(bytes(8) + b'{"k')


def test_a_cache_in_python_names_what_it_was_given(files, tiny_model):
    from transformers import AutoModelForCausalLM

    from kvlab import Cache
    from kvlab.core.errors import CalibrationMismatch

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for name in ("context.kvs", "moved.kv"):
        with refused(CalibrationMismatch, "calibration.other-kind", name, "a snapshot"):
            Cache(model, files / name)


def test_a_cache_does_not_take_the_name_of_a_codec(files, tiny_model, line):
    text = ("--model", tiny_model, "--text", files / "text.txt")
    refused_line(line("snapshot", "save", "x.kv", *text), "name it x.kvs")
    refused_line(line("encode", *text, "--recipe", files / "int4.kv", "--out", "x.kv"), "name it x.kvls")


def test_a_snapshot_under_another_name_is_read_all_the_same(files, tiny_model, line):
    code, out, _ = line("snapshot", "verify", files / "moved.kv", "--model", tiny_model)
    assert code == 0 and "whole" in out
