from __future__ import annotations

import functools
from pathlib import Path

import pytest

import tiny
from kvlab.cli import main as cli
from kvlab.cli import snapshot as snapshot_verbs


@pytest.fixture(scope="session")
def archive_file(tiny_model, tmp_path_factory) -> Path:
    """What `kvlab calibrate --codec archive` writes for the tiny model."""
    folder = tmp_path_factory.mktemp("archive")
    text = folder / "calibration.txt"
    text.write_text(" ".join(f"word {n} and {n * n}" for n in range(2000)))
    words = {"model": tiny_model, "codec": "archive", "bits": 8, "context": 64, "windows": 12, "text": text}
    given = [str(word) for key, value in words.items() for word in (f"--{key}", value)]
    cli.main(["calibrate", *given, "--out", str(folder / "archive.kv"), "--decoder", str(folder / "decoder.kv")])
    return folder / "archive.kv"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A text to score and another to calibrate on."""
    folder = tmp_path_factory.mktemp("texts")
    return tiny.write_text(folder / "scored.txt"), tiny.write_text(folder / "calibration.txt", seed=1)


loaded = functools.cache(snapshot_verbs._model)


@pytest.fixture
def run(line, monkeypatch):
    """Exit code, stdout and stderr of a verb of `kvlab snapshot`, in this process; a model is loaded once."""
    monkeypatch.setattr(snapshot_verbs, "_model", loaded)
    return functools.partial(line, "snapshot")
