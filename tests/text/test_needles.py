"""Needles: as long as promised, planted once where they say, asked for by their key, and found nowhere else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from kvlab.core.errors import CorpusError, ModelError
from kvlab.core.model import load_tokenizer, resolve
from kvlab.core.paramfile import overlay
from kvlab.text import corpus, needles
from kvlab_pipeline.studies.settings import Settings
from refusals import refused

CONTEXT = 160  # room for all distractors


def with_changes(params: Settings, **changes) -> Settings:
    return Settings.complete(overlay(params.model_dump(mode="json"), changes))


@pytest.fixture(scope="module")
def params(tiny_params) -> Settings:
    """All of one text; see `test_items_stand_in_the_text_of_another_domain`."""
    alone = {"corpus": {"other": None, "scored": ["test"]}, "ladder": {"texts": ["test"]}}
    return with_changes(tiny_params, windows={"context": CONTEXT}, mechanisms={"needles": 20}, **alone)


@pytest.fixture(scope="module")
def tokenizer(params):
    return load_tokenizer(resolve(params.model))


@pytest.fixture(scope="module")
def path(params, tmp_path_factory):
    out = tmp_path_factory.mktemp("needles") / "needles.parquet"
    needles.build(params, out)
    return out


@pytest.fixture(scope="module")
def built(params, path) -> needles.Needles:
    return needles.load(path, resolve(params.model).model_hash)


def places(ids: list[int], part: list[int]) -> list[int]:
    """Where a run of ids stands."""
    return [i for i in range(len(ids) - len(part) + 1) if ids[i : i + len(part)] == part]


# ------------------------------------------------------------------------------------------ an item


def test_every_context_is_exactly_as_long_as_the_windows(params, built):
    assert len(built.items) == params.mechanisms.needles and built.context == CONTEXT
    assert {len(item.context) for item in built.items} == {CONTEXT}


def test_the_needle_is_in_the_context_once_and_where_it_says(built):
    for item in built.items:
        assert places(item.context, item.question + item.answer) == [round(item.depth * CONTEXT)]
        assert places(item.context, item.question) == [round(item.depth * CONTEXT)]


def test_the_question_names_the_key_and_the_answer_is_the_value(path, built, tokenizer):
    rows = pl.read_parquet(path).to_dicts()
    for item, row in zip(built.items, rows, strict=True):
        assert tokenizer.decode(item.question) == f"\nNote: {row['key']}"
        assert tokenizer.decode(item.answer).strip() == row["value"]


def test_keys_and_values_differ_within_an_item_and_are_not_in_its_text(path, tokenizer):
    for row in pl.read_parquet(path).to_dicts():
        text = tokenizer.decode(row["context"])
        lines = [line for line in text.split("\n") if line.startswith("Note: ")]
        words = [word for line in lines for word in line.removeprefix("Note: ").removesuffix(".").split()]
        assert len(lines) == row["distractors"] + 1 == needles.DISTRACTORS + 1
        assert len(set(words)) == len(words) == 4 * len(lines)
        assert all(needles.LETTERED.findall(text).count(word) == 1 for word in words)


def test_depths_are_uniform(tiny_params, tokenizer):
    documents = corpus.read_documents(tiny_params.corpus)["test"]
    chance = np.random.default_rng(0)
    planter = needles.Planter(tokenizer, needles.words(documents, tokenizer), chance)
    text = corpus.stream(documents, tokenizer)[:CONTEXT].tolist()
    depths = [planter.plant(text, CONTEXT, []).needle.depth for _ in range(400)]
    last = max(depths)
    assert min(depths) < 0.02 and last < 1 and np.mean(depths) == pytest.approx(last / 2, abs=0.06)
    shares = np.histogram(depths, bins=4, range=(0, last))[0] / len(depths)
    assert shares.min() > 0.15


def test_the_sequence_ends_with_the_answer(built):
    for item in built.items:
        ids, place = needles.sequence(item)
        assert ids[:CONTEXT] == item.context and ids[place:] == item.answer
        assert ids[CONTEXT:place] == item.question and place - 1 > CONTEXT


@given(words=st.integers(2, 40), context=st.integers(2, 400))
def test_lines_fill_no_more_than_half(words, context):
    line = needles.Fact("key", "value", list(range(words - 1)), [1], [])
    if 2 * words > context:
        with refused(CorpusError, "corpus.short-context", f"windows.context to {2 * words}"):
            needles.fitting([line] * 4, context)
    else:
        kept = needles.fitting([line] * 4, context)
        assert 1 <= len(kept) <= 4 and len(kept) * words <= context / 2
        assert len(kept) == 4 or (len(kept) + 1) * words > context / 2


def test_short_contexts_have_fewer_distractors(tiny_params, tmp_path):
    short = with_changes(tiny_params, mechanisms={"needles": 5})
    found = needles.build(short, tmp_path / "n.parquet")
    assert {len(item.context) for item in found.items} == {64}
    least, most = json.loads((tmp_path / "n.json").read_text())["distractors"]
    assert 0 <= least <= most < needles.DISTRACTORS


# ------------------------------------------------------------------------------------------ all of them


def test_texts_are_not_those_that_are_calibrated_on_or_scored(params, tmp_path, tokenizer):
    windows = corpus.build(params, tmp_path / "w.safetensors")
    ids = corpus.stream(corpus.read_documents(params.corpus)["test"], tokenizer)
    texts, scored = needles.haystacks(ids, params, 0, np.random.default_rng(0))
    seen = {row.tobytes() for rows in (windows.calib, windows.test) for row in rows}
    assert scored == 0 and not seen & {row.tobytes() for row in texts}
    assert len({row.tobytes() for row in texts}) == len(texts) == params.mechanisms.needles


def test_every_item_has_a_text_of_its_own(built):
    texts = [tuple(item.context[:8]) for item in built.items if item.depth > 8 / CONTEXT]
    assert len(set(texts)) == len(texts) > 5


def test_scored_windows_are_used_last(params, tokenizer):
    ids = corpus.stream(corpus.read_documents(params.corpus)["test"], tokenizer)
    available = len(ids) // params.windows.length
    everything = with_changes(params, mechanisms={"needles": available})
    texts, scored = needles.haystacks(ids, everything, 0, np.random.default_rng(0))
    known = {row.tobytes() for row in corpus.cut(ids, params.windows, "test", [])}
    assert scored == params.windows.test and {row.tobytes() for row in texts[-scored:]} == known


def test_items_stand_in_the_text_of_another_domain_where_that_is_long_enough(tiny_params, tmp_path, tokenizer):
    two = with_changes(tiny_params, windows={"context": CONTEXT}, mechanisms={"needles": 20})
    found = needles.build(two, tmp_path / "n.parquet")
    record = json.loads((tmp_path / "n.json").read_text())
    assert record["source"] == two.corpus.other and record["texts_that_are_scored_windows"] == 0
    ids = corpus.stream(corpus.read_other(two.corpus)[0], tokenizer)
    beginnings = [item.context[:8] for item in found.items if item.depth > 8 / CONTEXT]
    there = sum(bool(places(ids.tolist(), beginning)) for beginning in beginnings)
    assert there > len(beginnings) / 2  # the others begin with a line of other keys
    short = tmp_path / "short.txt"
    short.write_text(Path(two.corpus.other).read_text()[:2000])
    needles.build(with_changes(two, corpus={"other": str(short)}), tmp_path / "m.parquet")
    assert json.loads((tmp_path / "m.json").read_text())["source"] == two.corpus.source


def test_documents_that_were_kept_give_the_same_items(params, path, tmp_path):
    corpus.write_texts(params, tmp_path / "texts.parquet")
    needles.build(params, tmp_path / "needles.parquet", tmp_path / "texts.parquet")
    assert (tmp_path / "needles.parquet").read_bytes() == path.read_bytes()
    assert (tmp_path / "needles.json").read_bytes() == path.with_suffix(".json").read_bytes()


def test_the_same_parameters_give_the_same_items(params, path, built, tmp_path):
    again = needles.build(params, tmp_path / "n.parquet")
    assert again == built and (tmp_path / "n.parquet").read_bytes() == path.read_bytes()


def test_another_seed_gives_others(params, built, tmp_path):
    other = needles.build(with_changes(params, windows={"seed": 1}), tmp_path / "n.parquet")
    assert other.needles_hash != built.needles_hash
    assert not {tuple(item.answer) for item in other.items} >= {tuple(item.answer) for item in built.items}


def test_the_record_says_what_was_planted(params, path, built):
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["needles_hash"] == built.needles_hash and record["model_hash"] == built.model_hash
    assert record["n"] == 20 and record["context"] == CONTEXT and record["seed"] == params.windows.seed
    assert record["distractors"] == [3, 3] and record["texts_that_are_scored_windows"] == 0
    assert record["longest"] == max(len(needles.sequence(item)[0]) for item in built.items)


def test_a_tokenizer_that_begins_every_text_begins_every_context(params, tmp_path):
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder = shutil.copytree(params.model.path, tmp_path / "begins")
    begun = AutoTokenizer.from_pretrained(folder)
    begun.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begun.eos_token_id)]
    )
    begun.save_pretrained(folder)
    found = needles.build(with_changes(params, model={"path": str(folder)}), tmp_path / "n.parquet")
    assert {len(item.context) for item in found.items} == {CONTEXT}
    assert {item.context[0] for item in found.items} == {begun.eos_token_id}
    assert all(begun.eos_token_id not in item.question + item.answer for item in found.items)


# ------------------------------------------------------------------------------------------ refusals


def test_a_corpus_that_is_too_short_says_by_how_much(params, tmp_path):
    with refused(CorpusError, "corpus.too-short", "mechanisms.needles", 9999):
        needles.build(with_changes(params, mechanisms={"needles": 9999}), tmp_path / "n.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_shared_document_is_refused(params, tmp_path, monkeypatch):
    paragraphs = tiny.paragraphs(60)
    monkeypatch.setattr(corpus, "read_documents", lambda _: {"calib": paragraphs[:31], "test": paragraphs[30:]})
    with refused(CorpusError, "corpus.shared-documents", "1 documents", "test split"):
        needles.build(params, tmp_path / "n.parquet")


def test_a_context_without_room_is_refused(params, tmp_path):
    with refused(CorpusError, "corpus.short-context", "windows.context is 16"):
        needles.build(with_changes(params, windows={"context": 16}, tradeoffs={"recent": 16}), tmp_path / "n.parquet")


def test_a_model_with_too_few_positions_is_refused(params, tmp_path):
    with refused(ModelError, None, "256 positions"):
        needles.build(with_changes(params, windows={"context": 250, "eval": 2}), tmp_path / "n.parquet")


def test_a_text_without_words_is_refused(tokenizer):
    with refused(CorpusError, "corpus.no-words", 6):
        needles.words(["123 Upper SHOUT a1b2c3d"], tokenizer)


def test_too_few_words_are_refused(tokenizer):
    few = needles.Planter(tokenizer, ["copper", "window", "garden", "silver"], np.random.default_rng(0))
    with refused(CorpusError, "corpus.too-few-lines", "0 of 4"):
        few.draw("a text")
    with refused(CorpusError, "corpus.too-few-lines", "3 of 4"):
        few.draw("the Copper age")


def test_a_tokenizer_that_joins_question_and_answer_is_refused():
    class Joining:
        """One token for a whole text."""

        def __call__(self, text, add_special_tokens):
            from types import SimpleNamespace

            return SimpleNamespace(input_ids=[len(text)])

    words = tiny.paragraphs(1)[0].removesuffix(".").split()
    with refused(CorpusError, "corpus.too-few-lines", "0 lines"):
        needles.Planter(Joining(), sorted(set(words)), np.random.default_rng(0)).draw("")


# ------------------------------------------------------------------------------------------ on disk


def test_another_model_s_items_are_refused(path):
    with refused(CorpusError, "corpus.other-model", "another"):
        needles.load(path, "another")


def test_changed_items_are_refused(path, built, tmp_path):
    rows = pl.read_parquet(path)
    rows.with_columns(answer=pl.col("answer").list.reverse()).write_parquet(tmp_path / "n.parquet")
    shutil.copy(path.with_suffix(".json"), tmp_path / "n.json")
    with refused(CorpusError, "corpus.changed"):
        needles.load(tmp_path / "n.parquet", built.model_hash)


@pytest.mark.parametrize(
    ("change", "code", "data"),
    [
        (lambda record: record | {"version": "0"}, "other-version", "version '0', allowed: '1'"),
        (lambda record: record | {"context": 64}, "changed", "n.parquet"),
        (lambda record: {}, "unreadable", "run `kvlab step needles`"),
        (lambda record: [], "unreadable", "run `kvlab step needles`"),
    ],
)
def test_a_record_of_other_items_is_refused(path, built, tmp_path, change, code, data):
    shutil.copy(path, tmp_path / "n.parquet")
    record = json.loads(path.with_suffix(".json").read_text())
    (tmp_path / "n.json").write_text(json.dumps(change(record)))
    with refused(CorpusError, f"corpus.{code}", data):
        needles.load(tmp_path / "n.parquet", built.model_hash)


def test_a_table_of_others_is_refused(path, built, tmp_path):
    pl.DataFrame({"item": [1]}).write_parquet(tmp_path / "n.parquet")
    shutil.copy(path.with_suffix(".json"), tmp_path / "n.json")
    with refused(CorpusError, "corpus.other-columns", "columns"):
        needles.load(tmp_path / "n.parquet", built.model_hash)


def test_missing_items_say_how_to_make_them(tmp_path):
    with refused(CorpusError, "corpus.unreadable", "`kvlab step needles`"):
        needles.load(tmp_path / "n.parquet", "any")


def test_the_version_is_the_registry_s(root):
    import yaml

    (listed,) = (root / "src/kvlab/gate").rglob("evals.yaml")
    entries = yaml.safe_load(listed.read_text())["evals"]
    (needle,) = [entry for entry in entries if entry["quality_eval_id"] == "needle"]
    assert needle["version"] == needles.VERSION


def test_no_torch_is_loaded_to_read_them(root):
    program = "import sys, kvlab.text.needles; print('torch' in sys.modules, 'transformers' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(root / "src")}
    )
    assert answer.stdout.split() == ["False", "False"], answer.stderr
