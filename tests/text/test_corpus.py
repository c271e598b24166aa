"""Windows: disjoint, whole, repeatable, and refused when the text cannot carry them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import tiny
from kvlab.core.errors import CorpusError, ModelError, ParamsError
from kvlab.core.model import resolve
from kvlab.core.paramfile import overlay
from kvlab.text import corpus
from kvlab.text import licences as corpus_licences
from kvlab_pipeline.studies.settings import Settings
from refusals import refused


def with_changes(params: Settings, **changes) -> Settings:
    return Settings.complete(overlay(params.model_dump(mode="json"), changes))


def test_calibration_and_test_windows_never_meet(tiny_params, tiny_windows):
    windows = corpus.load(tiny_windows, resolve(tiny_params.model).model_hash)
    assert windows.calib.shape == (6, 96) and windows.test.shape == (4, 96) and windows.other.shape == (3, 96)
    assert not {row.tobytes() for row in windows.calib} & {row.tobytes() for row in windows.test}
    assert corpus.overlap(windows) == 0.0 and corpus.overlap(windows, "other") == 0.0


def test_a_shared_document_is_refused(tiny_params, tmp_path, monkeypatch):
    words = tiny.paragraphs(60)
    monkeypatch.setattr(corpus, "read_documents", lambda _: {"calib": words[:31], "test": words[30:]})
    with refused(CorpusError, "corpus.shared-documents", "1 documents", "test split"):
        corpus.build(tiny_params, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_shared_window_is_refused_even_from_other_documents():
    rows = np.arange(192, dtype=np.int32).reshape(2, 96)
    windows = corpus.TokenWindows(rows, rows[1:], 64, "x", "y")
    with refused(CorpusError, "corpus.shared-windows", "'test'"):
        corpus.refuse_shared_windows(windows)


def test_a_window_of_the_other_text_that_the_calibration_saw_is_refused():
    rows = np.arange(288, dtype=np.int32).reshape(3, 96)
    windows = corpus.TokenWindows(rows[:2], rows[2:], 64, "x", "y", other=rows[1:2])
    with refused(CorpusError, "corpus.shared-windows", "'other'"):
        corpus.refuse_shared_windows(windows)


def test_the_other_text_may_not_be_the_calibration_s(tiny_params, tmp_path):
    same = with_changes(tiny_params, corpus={"other": tiny_params.corpus.source})
    with refused(CorpusError, "corpus.shared-documents", "the other text"):
        corpus.build(same, tmp_path / "w.safetensors")


def test_the_other_text_can_be_left_out(tiny_params, tiny_windows, tmp_path):
    alone = with_changes(tiny_params, corpus={"other": None}, ladder={"texts": ["test"]})
    windows = corpus.build(alone, tmp_path / "w.safetensors")
    loaded, with_other = (corpus.load(path, windows.model_hash) for path in (tmp_path / "w.safetensors", tiny_windows))
    assert loaded.other is None and np.array_equal(loaded.test, with_other.test)
    assert loaded.corpus_hash != with_other.corpus_hash
    with refused(CorpusError, "corpus.no-other-text", "`corpus.other`"):
        loaded.scored("other")
    assert np.array_equal(with_other.scored("other"), with_other.other)


def test_another_other_text_is_another_corpus(tiny_params, tiny_windows, tmp_path):
    text = tiny.write_text(tmp_path / "third.txt", seed=2)
    changed = corpus.build(with_changes(tiny_params, corpus={"other": str(text)}), tmp_path / "w.safetensors")
    known = corpus.load(tiny_windows, changed.model_hash)
    assert np.array_equal(changed.calib, known.calib) and changed.corpus_hash != known.corpus_hash


def test_licences_are_prose_without_copies_and_describe_themselves():
    licences = corpus_licences.extract()
    assert licences == corpus_licences.extract()
    paragraphs = [p for licence in licences for p in licence.text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs)) > 200
    mit = [p for p in paragraphs if p.startswith("Permission is hereby granted, free of charge")]
    assert len(mit) <= 2
    record = corpus_licences.describe(licences)
    assert record["distributions"].keys() == {licence.distribution for licence in licences}
    assert sum(part["bytes"] for part in record["distributions"].values()) > 100_000
    assert corpus_licences.describe(licences[:-1])["sha256"] != record["sha256"]


def test_a_copied_paragraph_is_dropped_though_its_lines_break_elsewhere():
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "ren", "tu") for b in ("sha", "vo", "pel", "dri", "an")]
    text, seen = " ".join(words), set()
    assert list(corpus_licences._new_paragraphs(text, seen)) == [text]
    again = "\n".join(words[:12]).upper() + " " + "\n".join(words[12:])
    assert list(corpus_licences._new_paragraphs(again + "\n\n" + "too short", seen)) == []
    other = " ".join(reversed(words))
    assert list(corpus_licences._new_paragraphs(other, seen)) == [other]


def test_licences_of_what_is_not_installed_say_what_to_do():
    with refused(CorpusError, "corpus.not-installed", "nowhere-to-be-found"):
        corpus_licences.extract(["nowhere-to-be-found"])


def test_an_other_text_that_is_too_short_is_named(tiny_params, tmp_path):
    with refused(CorpusError, "corpus.too-short", "other text", "windows.other", 9999):
        corpus.build(with_changes(tiny_params, windows={"other": 9999}), tmp_path / "w.safetensors")


def test_a_copied_run_shows_in_the_overlap():
    calib, test = np.arange(96, dtype=np.int32)[None], np.arange(1000, 1096, dtype=np.int32)[None].copy()
    test[0, :70] = calib[0, 20:90]
    assert corpus.overlap(corpus.TokenWindows(calib, test, 64, "x", "y")) == pytest.approx(7 / 33)


def test_the_same_parameters_give_the_same_windows(tiny_params, tiny_windows, tmp_path):
    again = corpus.build(tiny_params, tmp_path / "w.safetensors")
    assert again.corpus_hash == json.loads(tiny_windows.with_suffix(".json").read_text())["corpus_hash"]
    assert (tmp_path / "w.safetensors").read_bytes() == tiny_windows.read_bytes()


def test_texts_that_were_kept_give_the_same_windows(tiny_params, tiny_windows, tmp_path):
    corpus.write_texts(tiny_params, texts := tmp_path / "texts.parquet")
    again = corpus.build(tiny_params, tmp_path / "w.safetensors", texts)
    assert again.corpus_hash == corpus.load(tiny_windows, again.model_hash).corpus_hash
    assert (tmp_path / "w.json").read_bytes() == tiny_windows.with_suffix(".json").read_bytes()


@pytest.mark.parametrize("held", ["no parquet", "another table", "no record"])
def test_texts_that_cannot_be_read_are_refused(tiny_params, tmp_path, held):
    corpus.write_texts(tiny_params, texts := tmp_path / "texts.parquet")
    if held == "another table":
        pl.DataFrame({"line": ["of another table"]}).write_parquet(texts)
    else:
        (texts if held == "no parquet" else texts.with_suffix(".json")).write_text("[]")
    with refused(CorpusError, "corpus.unreadable", texts, "`kvlab step texts`"):
        corpus.build(tiny_params, tmp_path / "w.safetensors", texts)
    assert not (tmp_path / "w.safetensors").exists()


def test_texts_of_another_corpus_are_refused(tiny_params, tmp_path):
    corpus.write_texts(tiny_params, texts := tmp_path / "texts.parquet")
    with refused(CorpusError, "corpus.other-texts", texts, "nowhere.txt"):
        corpus.build(with_changes(tiny_params, corpus={"other": "nowhere.txt"}), tmp_path / "w.safetensors", texts)


def test_another_seed_chooses_others(tiny_params, tiny_windows, tmp_path):
    other = corpus.build(with_changes(tiny_params, windows={"seed": 1}), tmp_path / "w.safetensors")
    assert other.corpus_hash != json.loads(tiny_windows.with_suffix(".json").read_text())["corpus_hash"]


def test_labels_are_the_same_for_every_cell():
    windows = corpus.TokenWindows(np.zeros((1, 640), np.int32), np.zeros((1, 640), np.int32), 512, "x", "y")
    assert (windows.labels.start, windows.labels.stop, len(windows.labels)) == (513, 640, 127)


def test_a_corpus_that_is_too_short_says_by_how_much(tiny_params, tmp_path):
    with refused(CorpusError, "corpus.too-short", "windows.test", 9999):
        corpus.build(with_changes(tiny_params, windows={"test": 9999}), tmp_path / "w.safetensors")


def test_a_missing_corpus_names_what_is_allowed(tiny_params, tmp_path):
    with refused(CorpusError, "corpus.no-file", "corpus.source", "nowhere/*.txt"):
        corpus.build(with_changes(tiny_params, corpus={"source": "nowhere/*.txt"}), tmp_path / "w.safetensors")


def test_a_window_longer_than_the_model_is_refused(tiny_params, tmp_path):
    with refused(ModelError, None, "256 positions"):
        corpus.build(with_changes(tiny_params, windows={"context": 240}), tmp_path / "w.safetensors")


def test_changed_windows_are_refused(tiny_params, tiny_windows, tmp_path):
    data = bytearray(tiny_windows.read_bytes())
    data[-1] ^= 1
    (tmp_path / "w.safetensors").write_bytes(data)
    with refused(CorpusError, "corpus.changed"):
        corpus.load(tmp_path / "w.safetensors", resolve(tiny_params.model).model_hash)


def test_windows_of_another_tokenizer_are_refused(tiny_windows):
    with refused(CorpusError, "corpus.other-model", "another"):
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
    with refused(CorpusError, "corpus.unreadable", "`kvlab step corpus`"):
        corpus.load(tmp_path / "w.safetensors", "any")


def test_scored_windows_are_cut_from_the_texts_in_turn(tiny_params, tmp_path):
    turns = with_changes(
        tiny_params, corpus={"scored": ["other", "test"]}, windows={"test": 6}, ladder={"texts": ["test"]}
    )
    plain = with_changes(tiny_params, windows={"test": 3, "other": 3}, baseline={"windows": 3, "reruns": 3})
    found, apart = (corpus.build(one, tmp_path / f"{n}.safetensors") for n, one in enumerate((turns, plain)))
    assert [turns.corpus.text_of(window) for window in range(4)] == ["other", "test"] * 2
    assert np.array_equal(found.test[0::2], apart.other) and np.array_equal(found.test[1::2], apart.test)
    assert json.loads((tmp_path / "0.json").read_text())["scored"] == ["other", "test"]


def test_windows_of_an_earlier_run_are_left_out(tiny_params, tmp_path):
    few, many, later = (
        corpus.build(with_changes(tiny_params, **change), tmp_path / f"{n}.safetensors")
        for n, change in enumerate(
            (
                {"windows": {"test": 3}, "baseline": {"windows": 3, "reruns": 3}},
                {"windows": {"test": 6}},
                {"windows": {"test": 3, "skip": 3}, "baseline": {"windows": 3, "reruns": 3}},
            )
        )
    )
    earlier, both, own = ({row.tobytes() for row in one.test} for one in (few, many, later))
    assert earlier | own == both and not earlier & own
    assert np.array_equal(few.calib, later.calib)
    with refused(CorpusError, "corpus.too-short", "windows.skip, 100000"):
        corpus.build(with_changes(tiny_params, windows={"skip": 100_000}), tmp_path / "w.safetensors")


def test_a_text_that_is_not_named_cannot_be_scored(tiny_params):
    with refused(ParamsError, None, "corpus.scored", "'other'", "corpus.other"):
        with_changes(tiny_params, corpus={"other": None, "scored": ["other"]}, ladder={"texts": ["test"]})
    with refused(ParamsError, None, "corpus.scored", "test, test"):
        with_changes(tiny_params, corpus={"scored": ["test", "test"]})


# ------------------------------------------------------------------------------- documents of windows


def test_every_scored_window_names_the_document_that_fills_most_of_it(tiny_params, tmp_path):
    """By an oracle that walks the stream token by token."""
    made = corpus.build(tiny_params, tmp_path / "w.safetensors")
    tokenizer = corpus.load_tokenizer(resolve(tiny_params.model))
    texts = {
        "test": corpus.read_documents(tiny_params.corpus)["test"],
        "other": corpus.read_other(tiny_params.corpus)[0],
    }
    body = tiny_params.windows.length - len(corpus.bos(tokenizer))
    for text, documents in texts.items():
        of_token = [n for n, one in enumerate(documents) for _ in corpus.stream([one], tokenizer)]
        ids = corpus.stream(documents, tokenizer)
        rows = made.scored(text)
        assert len(made.documents[text]) == len(rows)
        for row, document in zip(rows, made.documents[text], strict=True):
            (start,) = [at for at in range(0, len(ids) - body + 1, body) if (ids[at : at + body] == row[-body:]).all()]
            inside = of_token[start : start + body]
            assert document == max(sorted(set(inside)), key=inside.count)


def test_windows_keep_their_documents_and_older_ones_have_none(tiny_params, tmp_path):
    made = corpus.build(tiny_params, tmp_path / "w.safetensors")
    read = corpus.load(tmp_path / "w.safetensors", made.model_hash)
    assert read.documents == made.documents and set(made.documents) == {"test", "other"}
    assert json.loads((tmp_path / "w.json").read_text())["window_documents"] == {
        text: list(numbers) for text, numbers in made.documents.items()
    }
    without = replace(made, documents={})
    assert without.corpus_hash == made.corpus_hash
    corpus.save(without, tmp_path / "older.safetensors")
    assert corpus.load(tmp_path / "older.safetensors", made.model_hash).documents == {}


def test_documents_of_texts_that_take_turns_have_other_numbers(tiny_params, tmp_path):
    turns = with_changes(
        tiny_params, corpus={"scored": ["other", "test"]}, windows={"test": 6}, ladder={"texts": ["test"]}
    )
    plain = with_changes(tiny_params, windows={"test": 3, "other": 3}, baseline={"windows": 3, "reruns": 3})
    found, apart = (corpus.build(one, tmp_path / f"{n}.safetensors") for n, one in enumerate((turns, plain)))
    others = len(corpus.read_other(turns.corpus)[0])
    assert found.documents["test"][0::2] == apart.documents["other"]
    assert found.documents["test"][1::2] == tuple(others + number for number in apart.documents["test"])
