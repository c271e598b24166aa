"""Windows: disjoint, whole, repeatable, and refused when the text cannot carry them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tiny
from kvlab import corpus
from kvlab.errors import CorpusError, ModelError
from kvlab.model import resolve
from kvlab.paramfile import overlay
from kvlab.params import Params


def with_changes(params: Params, **changes) -> Params:
    return Params.complete(overlay(params.model_dump(mode="json"), changes))


def test_calibration_and_test_windows_never_meet(tiny_params, tiny_windows):
    windows = corpus.load(tiny_windows, resolve(tiny_params.model).model_hash)
    assert windows.calib.shape == (6, 96) and windows.test.shape == (4, 96)
    assert not {row.tobytes() for row in windows.calib} & {row.tobytes() for row in windows.test}
    assert corpus.overlap(windows) == 0.0


def test_a_shared_document_is_refused(tiny_params, tmp_path, monkeypatch):
    words = tiny.paragraphs(60)
    monkeypatch.setattr(corpus, "read_documents", lambda _: {"calib": words[:31], "test": words[30:]})
    with pytest.raises(CorpusError, match="1 documents are in the calibration and in the test split"):
        corpus.build(tiny_params, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_shared_window_is_refused_even_from_other_documents():
    rows = np.arange(192, dtype=np.int32).reshape(2, 96)
    windows = corpus.TokenWindows(rows, rows[1:], 64, "x", "y")
    with pytest.raises(CorpusError, match="also a test window"):
        corpus.refuse_shared_windows(windows)


def test_a_copied_run_shows_in_the_overlap():
    calib, test = np.arange(96, dtype=np.int32)[None], np.arange(1000, 1096, dtype=np.int32)[None].copy()
    test[0, :70] = calib[0, 20:90]
    assert corpus.overlap(corpus.TokenWindows(calib, test, 64, "x", "y")) == pytest.approx(7 / 33)


def test_the_same_parameters_give_the_same_windows(tiny_params, tiny_windows, tmp_path):
    again = corpus.build(tiny_params, tmp_path / "w.safetensors")
    assert again.corpus_hash == json.loads(tiny_windows.with_suffix(".json").read_text())["corpus_hash"]
    assert (tmp_path / "w.safetensors").read_bytes() == tiny_windows.read_bytes()


def test_another_seed_chooses_others(tiny_params, tiny_windows, tmp_path):
    other = corpus.build(with_changes(tiny_params, windows={"seed": 1}), tmp_path / "w.safetensors")
    assert other.corpus_hash != json.loads(tiny_windows.with_suffix(".json").read_text())["corpus_hash"]


def test_labels_are_the_same_for_every_cell():
    windows = corpus.TokenWindows(np.zeros((1, 640), np.int32), np.zeros((1, 640), np.int32), 512, "x", "y")
    assert (windows.labels.start, windows.labels.stop, len(windows.labels)) == (513, 640, 127)


def test_a_corpus_that_is_too_short_says_by_how_much(tiny_params, tmp_path):
    with pytest.raises(CorpusError, match=r"too short.*windows\.test asks for 9999"):
        corpus.build(with_changes(tiny_params, windows={"test": 9999}), tmp_path / "w.safetensors")


def test_a_missing_corpus_names_what_is_allowed(tiny_params, tmp_path):
    with pytest.raises(CorpusError, match="matches no file"):
        corpus.build(with_changes(tiny_params, corpus={"source": "nowhere/*.txt"}), tmp_path / "w.safetensors")


def test_a_window_longer_than_the_model_is_refused(tiny_params, tmp_path):
    with pytest.raises(ModelError, match="256 positions"):
        corpus.build(with_changes(tiny_params, windows={"context": 240}), tmp_path / "w.safetensors")


def test_changed_windows_are_refused(tiny_params, tiny_windows, tmp_path):
    data = bytearray(tiny_windows.read_bytes())
    data[-1] ^= 1
    (tmp_path / "w.safetensors").write_bytes(data)
    with pytest.raises(CorpusError, match="does not match its own hash"):
        corpus.load(tmp_path / "w.safetensors", resolve(tiny_params.model).model_hash)


def test_windows_of_another_tokenizer_are_refused(tiny_windows):
    with pytest.raises(CorpusError, match="tokenised for model"):
        corpus.load(tiny_windows, "another")


def test_a_dataset_uses_its_own_splits(tiny_params, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    texts = {"train": tiny.paragraphs(40), "validation": tiny.paragraphs(40, seed=1)}
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, config, split: datasets.Dataset.from_dict({"text": texts[split]}),
    )
    changed = with_changes(
        tiny_params, corpus={"source": "datasets:owner/name", "splits": {"calib": "train", "test": "validation"}}
    )
    windows = corpus.build(changed, tmp_path / "w.safetensors")
    assert len(windows.test) == 4


def test_a_file_of_others_is_refused_in_one_line(tmp_path):
    from safetensors.numpy import save_file

    save_file({"calib": np.zeros((1, 4), np.int32), "test": np.ones((1, 4), np.int32)}, tmp_path / "w.safetensors")
    with pytest.raises(CorpusError, match="run `kvlab corpus`"):
        corpus.load(tmp_path / "w.safetensors", "any")
