"""RULER's texts: as long as promised, every answer hidden as often as it should be, equal for equal seeds."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import CorpusError
from kvlab.core.model import load_tokenizer, resolve
from kvlab.core.params import Model
from kvlab.text import ruler
from kvlab_pipeline.studies.mechanisms.params import Mechanisms
from refusals import refused

pytestmark = pytest.mark.nightly  # texts that the default run does not ask for

LENGTHS, TEXTS = (900, 1200), 3
NUMBER = re.compile(r"(?<!\d)\d{7}(?!\d)")


def params(seed=0, **changed):
    settings = {"tasks": tuple(ruler.FORMS), "lengths": LENGTHS, "texts": TEXTS} | changed
    model = Model(path="models/reference", n_layers=6)
    return SimpleNamespace(model=model, mechanisms=Mechanisms(**settings), windows=SimpleNamespace(seed=seed))


@pytest.fixture(scope="module")
def info():
    return resolve(params().model)


@pytest.fixture(scope="module")
def tokenizer(info):
    return load_tokenizer(info)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("ruler") / "ruler.parquet"
    ruler.build(params(), out)
    return out


@pytest.fixture(scope="module")
def built(path, info):
    return ruler.load(path, info.model_hash)


def of(built, task):
    return [item for item in built.items if item.task == task]


def test_there_are_so_many_items_of_every_task_at_every_length(built):
    for task in ruler.FORMS:
        items = of(built, task)
        assert [item.number for item in items] == list(range(TEXTS * len(LENGTHS)))
        assert [item.length for item in items] == [length for length in LENGTHS for _ in range(TEXTS)]


def test_text_question_and_answer_fit_the_length_and_nearly_fill_it(built):
    for item in built.items:
        whole = len(item.context) + len(item.question) + item.written
        assert 0.6 * item.length < whole <= item.length


def test_the_answer_has_room_in_what_may_be_written(built, tokenizer):
    for item in built.items:
        assert len(tokenizer(": " + ", ".join(item.answers)).input_ids) <= item.written


@pytest.mark.parametrize(("task", "hidden"), [("niah_single", 1), ("niah_multikey", 4), ("niah_multivalue", 2)])
def test_numbers_stand_in_the_context_once_each_and_none_in_the_question(built, tokenizer, task, hidden):
    for item in of(built, task):
        found = NUMBER.findall(tokenizer.decode(item.context))
        assert len(found) == len(set(found)) == hidden
        assert set(item.answers) <= set(found)
        assert len(item.answers) == (2 if task == "niah_multivalue" else 1)
        assert not NUMBER.findall(tokenizer.decode(item.question))


def test_keys_of_other_needles_differ_from_the_one_that_is_asked_for(built, tokenizer):
    for item in of(built, "niah_multikey"):
        keys = re.findall(r"numbers? for (\S+) is", tokenizer.decode(item.context))
        assert len(keys) == len(set(keys)) == 4
        (asked,) = [key for key in keys if key in tokenizer.decode(item.question)]
        line = re.search(rf"for {re.escape(asked)} is: (\d+)", tokenizer.decode(item.context))
        assert [line.group(1)] == item.answers


def test_variables_are_tracked_by_a_number_and_stand_in_no_question(built, tokenizer):
    for item in of(built, "vt"):
        context, question = tokenizer.decode(item.context), tokenizer.decode(item.question)
        first, second = item.answers
        (value,) = set(re.findall(r"\d{5}", question))
        assert context.count(f"VAR {first} = {value}") == 1
        assert context.count(f"VAR {second} = VAR {first}") == 1
        assert first not in question and second not in question


def test_equal_seeds_give_equal_items_and_others_others(built, tmp_path):
    again = ruler.build(params(), tmp_path / "again.parquet")
    assert again == built
    other = ruler.build(params(seed=1), tmp_path / "other.parquet")
    assert not {item.answers[0] for item in other.items} & {item.answers[0] for item in built.items}


def test_the_processs_own_draws_go_on_as_before(tmp_path):
    random.seed(5), np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5), np.random.seed(5)
    ruler.build(params(lengths=(900,), texts=2), tmp_path / "ruler.parquet")
    assert (random.random(), np.random.random()) == expected


def test_a_length_beyond_the_models_positions_is_left_out_and_named(tmp_path):
    found = ruler.build(params(lengths=(4096,)), tmp_path / "ruler.parquet")
    record = ruler.read_items(tmp_path / "ruler.parquet", ruler.VERSION, ruler.ROWS, resolve(params().model).model_hash)
    assert found.items == ()
    assert (record[0]["lengths"], record[0]["left_out"], record[0]["tasks"]) == ([], [4096], {})


@pytest.mark.parametrize("task", ruler.FORMS)
def test_a_length_without_room_is_refused(tmp_path, task):
    with refused(CorpusError, "corpus.task-does-not-fit", f"{task} of 128 tokens"):
        ruler.build(params(lengths=(128,), tasks=(task,)), tmp_path / "ruler.parquet")


def test_changed_items_are_refused(built, path, tmp_path, info):
    import polars as pl

    copy = tmp_path / "ruler.parquet"
    pl.read_parquet(path).with_columns(answers=pl.lit(["1"])).write_parquet(copy)
    copy.with_suffix(".json").write_text(path.with_suffix(".json").read_text())
    with refused(CorpusError, "corpus.changed"):
        ruler.load(copy, info.model_hash)
    with refused(CorpusError, "corpus.other-model", "other"):
        ruler.load(path, "other")


@given(st.lists(st.text("abC1 ", min_size=1, max_size=4), min_size=1, max_size=4), st.text("ABc1 ", max_size=30))
def test_the_score_is_that_of_lm_evaluation_harness(answers, written):
    from lm_eval.tasks.ruler.common_utils import string_match_all

    assert ruler.score(written, answers) == pytest.approx(string_match_all([written], [answers]))


def test_the_score_counts_each_answer_wherever_it_stands():
    assert ruler.score(": 123, and 456.", ["456", "123"]) == 1
    assert ruler.score("123 123", ["123", "456"]) == 0.5
    assert ruler.score("", ["1"]) == 0
