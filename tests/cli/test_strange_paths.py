"""Verbs on folders and files whose names hold what a shell would read: models, texts, what is read and written."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from safetensors.torch import load_file

import tiny
from kvlab.cli import main as cli


@pytest.fixture
def place(tiny_model, tmp_path, monkeypatch):
    """The name of a folder with a model, a text to score and another to calibrate on; commands are typed in it.

    It begins with a dash, and has all that a shell, a template or a pattern would read.
    """
    name = "-o it's  a" + '#a%b*?[x]!;&|<>()~^=,@+é:"$`\\'
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    shutil.copytree(tiny_model, folder / name / name)
    tiny.write_text(folder / f"scored {name}.txt")
    tiny.write_text(folder / f"calibration {name}.txt", seed=1)
    return name


def verb(*words) -> None:
    """A command that must succeed; paths are typed after an `=`, since they may begin with a dash."""
    cli.main([str(word) for word in words])


def test_a_model_is_calibrated_measured_coded_and_kept(place, capsys):
    model, scored, other = f"./{place}/{place}", f"scored {place}.txt", f"calibration {place}.txt"
    klt, small = f"klt {place}.kv", ("--context", 64, "--windows", 4)
    verb("calibrate", f"--model={model}", f"--text={other}", *small, f"--out={klt}")
    verb(
        "measure", model, f"--text={scored}", f"--calibration={klt}", "--eval", 32, *small, f"--json=found {place}.json"
    )
    with open(f"found {place}.json") as found:
        assert json.load(found)["rows"][-1]["codec"] == "klt"
    with open(f"short {place}.txt", "w") as out:
        out.write("a cache that is kept " * 4)
    kept, given = f"kept {place}.kvs", (f"--model={model}", f"--text=short {place}.txt", f"--recipe={klt}")
    verb("snapshot", "save", kept, *given)
    verb("snapshot", "inspect", kept)
    verb("snapshot", "restore", kept, *given, "--unproven", "--decode", 2)
    capsys.readouterr()


def test_a_whole_cache_is_put_into_a_file_and_read_back(place, archive_file, tiny_params, capsys):
    shutil.copy(archive_file, f"archive {place}.kv")
    text = f"short {place}.txt"
    with open(text, "w") as out:
        out.write("a cache that is kept " * 4)
    params = tiny_params.model_dump(mode="json")
    params["model"]["path"] = f"./{place}/{place}"
    given = ("--params", json.dumps(params), f"--recipe=archive {place}.kv")
    verb("encode", *given, f"--text={text}", f"--out=coded {place}.kva")
    verb("decode", *given, f"--stream=coded {place}.kva", f"--out=read {place}.safetensors")
    assert load_file(f"read {place}.safetensors")
    capsys.readouterr()


def test_a_params_yaml_names_the_model_as_it_is(place, capsys):
    verb("init", f"--model=./{place}/{place}", f"--out=mine {place}.yaml", "--engines", "hf")
    verb("params", f"--params=mine {place}.yaml")
    with open(f"mine {place}.yaml") as written:
        assert yaml.safe_load(written)["models"][0]["path"] == f"./{place}/{place}"
    capsys.readouterr()
