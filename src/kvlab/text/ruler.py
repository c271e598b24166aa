"""Items of RULER's tasks at lengths that small models can do: needles in a haystack, and variables to be tracked.

The texts, their wording and the sizes of their haystacks are made by lm-evaluation-harness's generators of RULER (Hsieh
et al. 2024, arXiv 2404.06654). Only haystacks that are made up of repeated sentences are used: those of essays want a
data set from the hub, and NLTK's. What differs from RULER is `FORMS`: fewer values, fewer hops, four keys in a
haystack of repeated sentences, where RULER has essays. The text up to the question is the context, which is stored;
the question and the beginning of the answer follow it. A model's answer is scored by RULER's `string_match_all`.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from kvlab.core.errors import CorpusError, MissingResult
from kvlab.core.model import ModelInfo, load_tokenizer, resolve
from kvlab.core.params import Params
from kvlab.core.records import forget, sha256, write_json, write_table
from kvlab.text.needles import read_items

VERSION = "1"  # of the items and of how they are scored; the gate's registry names it


class Form(NamedTuple):
    """How one task is made.

    Parameters
    ----------
    question : str
        What the part after the stored context begins with.
    written : int
        Tokens that a model writes at most: room for the answer however a tokenizer spells it, a digit a token.
    settings : dict of str to int
        What lm-evaluation-harness's generator is told.
    """

    question: str
    written: int
    settings: dict[str, int]


FORMS = {
    "niah_single": Form("\nWhat ", 16, {"num_needle_k": 1, "num_needle_v": 1}),
    "niah_multikey": Form("\nWhat ", 16, {"num_needle_k": 4, "num_needle_v": 1}),
    "niah_multivalue": Form("\nWhat ", 28, {"num_needle_k": 1, "num_needle_v": 2}),
    "vt": Form("\nQuestion:", 24, {"num_hops": 1}),
}
"""RULER has one, four and one key with one, one and four values, and chains of four hops."""
ATTEMPTS = 4  # at texts that fit
SENTENCES = 2  # by which a text of variables grows while its size is sought, and the fewest in it
SPARE = 16  # tokens by which a question may be longer than those of the last attempt
EXAMPLE = 500  # tokens of RULER's solved example before a chain of variables, at most

ROWS = pl.Schema(
    {
        "task": pl.String,
        "length": pl.Int32,
        "number": pl.Int32,
        "context": pl.List(pl.Int32),
        "question": pl.List(pl.Int32),
        "answers": pl.List(pl.String),
    }
)


class RulerItem(NamedTuple):
    """One text and its question: token ids, and the strings that have to be written.

    `length` is RULER's: the most tokens that the text, the question and the answer may have together. `number` counts
    the items of a task over all its lengths.
    """

    task: str
    length: int
    number: int
    context: list[int]
    question: list[int]
    answers: list[str]

    @property
    def written(self) -> int:
        """Tokens that a model may write."""
        return FORMS[self.task].written


@dataclass(frozen=True)
class Ruler:
    """All items of one model, with the hash of them all."""

    items: tuple[RulerItem, ...]
    items_hash: str


def score(written: str, answers: Sequence[str]) -> float:
    """The share of the answers that stand somewhere in what was written, whatever their case: RULER's match of all."""
    return sum(answer.lower() in written.lower() for answer in answers) / len(answers)


# ---------------------------------------------------------------------------------------- building


def build(params: Params, out: Path) -> Ruler:
    """Make ``mechanisms.texts`` items of every task and length, and write ``ruler.parquet`` with its ``.json``.

    Lengths that the model has no positions for are left out, which the record says.

    Raises
    ------
    CorpusError
        A text has no room for what is to be hidden in it.
    MissingResult
        lm-evaluation-harness is not installed.
    """
    info, settings = resolve(params.model), params.mechanisms
    lengths = [length for length in sorted(settings.lengths) if length < info.max_positions]
    items = tuple(
        item
        for task in settings.tasks
        for item in items_of(task, lengths, settings.texts, params.windows.seed, info, load_tokenizer(info))
    )
    found = Ruler(items, items_hash(items))
    forget(out)
    write_table(out, pl.DataFrame([item._asdict() for item in items], schema=ROWS))
    write_json(Path(out).with_suffix(".json"), describe(found, params, lengths, info))
    return found


def items_of(
    task: str, lengths: Sequence[int], texts: int, seed: int, info: ModelInfo, tokenizer
) -> Iterator[RulerItem]:
    """So many items of one task at each length; equal seeds give equal items."""
    number = 0
    for length in lengths:
        for text in fitting(task, length, texts, seed, info, tokenizer):
            yield RulerItem(task, length, number, *text)
            number += 1


def fitting(task: str, length: int, texts: int, seed: int, info: ModelInfo, tokenizer) -> list[tuple]:
    """Contexts, questions and answers that fit; the generators do not count the beginning of the answer."""
    room = FORMS[task].written
    for _ in range(ATTEMPTS):
        made = [parts(task, one, tokenizer) for one in samples(task, length, texts, room, seed, info, tokenizer)]
        over = max(len(context) + len(question) for context, question, _ in made) + FORMS[task].written - length
        if over <= 0:
            return made
        room += over + SPARE
    raise CorpusError(f"{task} of {length} tokens does not fit: give a greater length in mechanisms.lengths")


def parts(task: str, sample: dict, tokenizer) -> tuple[list[int], list[int], list[str]]:
    """What is stored, what follows it, and what is to be written."""
    whole = f"{sample['input'].rstrip()} {sample['gen_prefix']}"
    cut = whole.rindex(FORMS[task].question)
    context, question = tokenizer(whole[:cut]), tokenizer(whole[cut:], add_special_tokens=False)
    return list(context.input_ids), list(question.input_ids), list(sample["outputs"])


def samples(task: str, length: int, texts: int, room: int, seed: int, info: ModelInfo, tokenizer) -> list[dict]:
    """What the generator of a task makes, `room` tokens short of the length: its dictionaries."""
    form, (niah, template, tracking) = FORMS[task], generators()
    if "num_hops" in form.settings:
        return chains(task, length, texts, room, seed, tokenizer, tracking)
    with seeded(f"{task} {length} {seed}"):
        try:
            return niah.generate_samples(
                niah.get_haystack("repeat"),
                tokenizer,
                max_seq_length=length,
                type_haystack="repeat",
                type_needle_k="words",
                type_needle_v="numbers",
                template=template,
                num_samples=texts,
                tokens_to_generate=room,
                **form.settings,
            )
        except (ValueError, RuntimeError) as error:
            raise CorpusError(
                f"no {task} of {length} tokens with {info.slug}'s tokenizer: {error}", code="corpus.task-does-not-fit"
            ) from None


def chains(task: str, length: int, texts: int, room: int, seed: int, tokenizer, tracking) -> list[dict]:
    """The same of variables, after a solved example; its generator tries for ever where nothing fits."""
    hops = FORMS[task].settings["num_hops"]
    given = {"tokenizer": tokenizer, "tokens_to_generate": room, "num_hops": hops, "incremental": SENTENCES}
    shortest = min(EXAMPLE, length // 2)
    with seeded(f"{task} {length} {seed}"):
        least = len(tokenizer(tracking.generate_input_output(SENTENCES, 1, hops)[0]).input_ids) + room + 2 * SPARE
        if least > shortest:
            raise CorpusError(
                f"no {task} of {length} tokens fits: give {2 * least} or more in mechanisms.lengths",
                code="corpus.task-does-not-fit",
            )
        make = tracking.sys_vartrack_w_noise_random
        (example,) = make(num_samples=1, max_seq_length=shortest, **given)
        return make(num_samples=texts, max_seq_length=length, icl_example=example, **given)


def generators() -> tuple:
    """lm-evaluation-harness's module of needles, its template, and its module of variables.

    Its module fetches NLTK's sentences as it is imported, which essays alone need: it is kept from that.
    """
    try:
        import nltk

        fetch, nltk.download = nltk.download, lambda *_given, **_named: False
        try:
            with redirect_stdout(io.StringIO()):
                from lm_eval.tasks.ruler import niah_utils, prepare_niah, vt_utils
        finally:
            nltk.download = fetch
    except ImportError as error:
        raise MissingResult(f"mechanisms.tasks needs lm-evaluation-harness with its RULER tasks: {error}") from None
    return prepare_niah, niah_utils.TEMPLATE, vt_utils


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """The generators draw from the process's own two sources: both begin anew here, and go on afterwards as before.

    They also print what they do.
    """
    before, arrays_before = random.getstate(), np.random.get_state()
    start = int(sha256(name.encode())[:8], 16)
    random.seed(start)
    np.random.seed(start)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        random.setstate(before)
        np.random.set_state(arrays_before)


# ---------------------------------------------------------------------------------------- on disk


def items_hash(items: Sequence[RulerItem]) -> str:
    """Identity of the items."""
    return sha256(json.dumps([list(item) for item in items]).encode())


def describe(found: Ruler, params: Params, lengths: Sequence[int], info: ModelInfo) -> dict:
    """What ``ruler.json`` says; `tasks` counts the items of each task, `greedy` the windows that are written on."""
    tasks = {task: sum(item.task == task for item in found.items) for task in params.mechanisms.tasks}
    return {
        "version": VERSION,
        "n": len(found.items),
        "tasks": {task: count for task, count in tasks.items() if count},
        "lengths": list(lengths),
        "greedy": params.mechanisms.greedy,
        "left_out": sorted(set(params.mechanisms.lengths) - set(lengths)),
        "model_hash": info.model_hash,
        "items_hash": found.items_hash,
        "seed": params.windows.seed,
    }


def load(path: Path, model_hash: str) -> Ruler:
    """Read the items back and check that they are whole and made for this model.

    Raises
    ------
    CorpusError
        A file is missing or changed, is of another version, or was tokenised for another model.
    """
    record, rows = read_items(path, VERSION, ROWS, model_hash)
    found = tuple(RulerItem(**row) for row in rows.iter_rows(named=True))
    if items_hash(found) != record.get("items_hash"):
        raise CorpusError(
            f"{path} does not match its own hash; it was changed after it was written", code="corpus.changed"
        )
    return Ruler(found, record["items_hash"])
