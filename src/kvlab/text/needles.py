"""Retrieval items: a fact planted in a text, and a question after the text that asks for it.

After RULER's needle with many keys (Hsieh et al. 2024, arXiv 2404.06654): a key and its value stand on one line
somewhere in the context, among lines of the same wording with other keys, and the answer is the value. The wording is
for base models: the question is the beginning of the planted line, so that the answer is its continuation. Key and
value are words drawn at random, in no order that a model could know, and none of them stands in the text: a guess at
two of five hundred words is right once in a quarter of a million times. Every item has a text of its own, from
documents that the calibration does not see, and from none of the scored windows as long as the corpus lasts: from the
text of another domain (`corpus.other`), where that is long enough, for a codec loses less in what it was fitted to.

The reference model in bfloat16 finds about two thirds of 200 needles in contexts of 512 tokens, and none of them once
the line in the context is left out or holds another value; before it was trained on copying it found none at all.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import polars as pl

from kvlab.core.errors import CorpusError, StorageError
from kvlab.core.model import check_window, load_tokenizer, resolve
from kvlab.core.params import Params
from kvlab.core.records import forget, read_json, sha256, write_json, write_table
from kvlab.text import corpus

VERSION = "1"  # of the items' wording and of how they are drawn; the gate's registry names it
QUESTION = "\nNote: {key}"
ANSWER = " {value}"
END = ".\n"
DISTRACTORS = 3  # lines with other keys, as far as all lines fill no more than half of the context
KEY_WORDS = VALUE_WORDS = 2
WORDS = 500  # to draw from: of the corpus, those of the fewest tokens, so that models of any size can spell them
LETTERS = 6  # of a word, at least: shorter ones, such as "there", stand in for no name
DRAWS = 100  # attempts at a line; a tokenizer may refuse some
STREAM = 1  # of the seed: the windows are chosen with the seed alone
Text = Literal["test", "other"]
LETTERED = re.compile(r"[^\W\d_]+")

ROWS = pl.Schema(
    {
        "item": pl.Int32,
        "depth": pl.Float64,
        "key": pl.String,
        "value": pl.String,
        "distractors": pl.Int32,
        "context": pl.List(pl.Int32),
        "question": pl.List(pl.Int32),
        "answer": pl.List(pl.Int32),
    }
)


class Needle(NamedTuple):
    """Token ids of one item: the context, the question after it, and the answer to be written.

    `depth` is the place of the planted fact's first token, as a share of the context.
    """

    context: list[int]
    question: list[int]
    answer: list[int]
    depth: float


@dataclass(frozen=True)
class Needles:
    """All items of one model.

    Attributes
    ----------
    items : tuple of Needle
    context : int
        Tokens of every context.
    needles_hash : str
        Hash of all token ids.
    model_hash : str
        The model whose tokenizer made the ids.
    """

    items: tuple[Needle, ...]
    context: int
    needles_hash: str
    model_hash: str


def sequence(needle: Needle) -> tuple[list[int], int]:
    """What is fed for one item, the answer included, and the place of the answer's first token in it.

    Row ``i - 1`` of the logits predicts token ``i``: a needle is found if the rows from ``place - 1`` up to the
    last but one have the answer's tokens as their most likely ones, which is when greedy decoding writes it.
    """
    prompt = [*needle.context, *needle.question]
    return [*prompt, *needle.answer], len(prompt)


# ---------------------------------------------------------------------------------------- building


class Fact(NamedTuple):
    """One line: its words, and its ids up to the value, of the value, and of what ends it."""

    key: str
    value: str
    question: list[int]
    answer: list[int]
    end: list[int]

    @property
    def ids(self) -> list[int]:
        """The whole line."""
        return [*self.question, *self.answer, *self.end]


class Planted(NamedTuple):
    """An item and what was planted in it."""

    needle: Needle
    fact: Fact
    distractors: int


def build(params: Params, out: Path, kept: Path | None = None) -> Needles:
    """Plant a fact in each of ``mechanisms.needles`` texts, and write ``needles.parquet`` with its ``.json``.

    Parameters
    ----------
    kept : Path, optional
        What `corpus.write_texts` wrote; without, the corpus is read again.

    Raises
    ------
    CorpusError
        The text has fewer windows than there are items, the context has no room for a fact, or the tokenizer
        cannot tell a question from its answer.
    ModelError
        The model has too few positions.
    """
    info, context = resolve(params.model), params.windows.context
    tokenizer = load_tokenizer(info)
    prefix = corpus.bos(tokenizer)
    seeds = [params.windows.seed, STREAM, *([params.windows.skip] if params.windows.skip else [])]
    chance = np.random.default_rng(seeds)
    text, found = planted_in(params, kept, tokenizer, len(prefix))
    texts, scored = haystacks(corpus.stream(found, tokenizer), params, len(prefix), chance, text)
    planter = Planter(tokenizer, words(found, tokenizer), chance)
    planted = [planter.plant(text.tolist(), context, prefix) for text in texts]
    check_window(info, max(len(sequence(one.needle)[0]) for one in planted))
    items = tuple(one.needle for one in planted)
    needles = Needles(items, context, needles_hash(items, context), info.model_hash)
    forget(out)
    write_table(out, table(planted))
    write_json(Path(out).with_suffix(".json"), describe(needles, params, planted, len(planter.words), scored, text))
    return needles


def planted_in(params: Params, kept: Path | None, tokenizer, prefixed: int) -> tuple[Text, list[str]]:
    """The text that items stand in, and its documents: that of another domain, where it has a window for each item."""
    documents, _ = corpus.documents_of(params, kept)
    corpus.refuse_shared_documents(documents)
    body = params.windows.length - prefixed
    other = documents.get("other", [])
    if len(corpus.stream(other, tokenizer)) // body >= params.mechanisms.needles:
        return "other", other
    return "test", documents["test"]


def haystacks(
    ids: np.ndarray, params: Params, prefixed: int, chance: np.random.Generator, text: Text = "test"
) -> tuple[np.ndarray, int]:
    """As many texts as there are items, shape (items, tokens of a window), and how many of them are scored windows.

    Texts are cut as the windows are, so that those which are scored can be left for the last.
    """
    windows, wanted = params.windows, params.mechanisms.needles
    head = [0] * prefixed  # the windows' own, in whose place the texts are cut
    available = len(ids) // (windows.length - prefixed)
    if available < wanted:
        raise CorpusError(
            f"the corpus is too short: its test split has {len(ids)} tokens, {available} windows of {windows.length},"
            f" and mechanisms.needles asks for {wanted} texts",
            code="corpus.too-short",
        )
    every = corpus.cut(ids, windows.model_copy(update={"skip": 0}), text, head, available)
    scored = max(windows.test, windows.other) if text == "other" else windows.test
    known = {row.tobytes() for row in corpus.cut(ids, windows, text, head, min(scored, available - windows.skip))}
    order = chance.permutation(available)
    chosen = sorted(order, key=lambda i: every[i].tobytes() in known)[:wanted]
    return every[chosen][:, prefixed:], sum(every[i].tobytes() in known for i in chosen)


def words(documents: Iterable[str], tokenizer) -> list[str]:
    """The words of a corpus that a tokenizer spells with the fewest tokens, of equals the most frequent; at most 500.

    Only words between blanks count, all of lower-case letters: they are written alike wherever they stand.
    """
    found = Counter(word for text in documents for word in text.split())
    found = {word: n for word, n in found.items() if len(word) >= LETTERS and word.isalpha() and word.islower()}
    if not found:
        raise CorpusError(
            f"the test split has no words of {LETTERS} or more lower-case letters to plant", code="corpus.no-words"
        )
    spelled = tokenizer([f" {word}" for word in found], add_special_tokens=False).input_ids
    tokens = dict(zip(found, map(len, spelled), strict=True))
    return sorted(found, key=lambda word: (tokens[word], -found[word], word))[:WORDS]


class Planter:
    """Plants lines in texts.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    words : sequence of str
        What keys and values are made of.
    chance : numpy.random.Generator
        Draws them, and their places.
    """

    def __init__(self, tokenizer, words: Sequence[str], chance: np.random.Generator):
        self.tokenizer, self.words, self.chance = tokenizer, words, chance

    def plant(self, text: list[int], context: int, prefix: list[int]) -> Planted:
        """Put lines at uniformly random places of a text that is cut to fit, and ask for the first one drawn."""
        facts = fitting(self.draw(self.tokenizer.decode(text)), context)
        room = context - len(prefix) - sum(len(fact.ids) for fact in facts)
        cuts = self.chance.integers(0, room, size=len(facts), endpoint=True).tolist()
        ids, start, done = list(prefix), 0, 0
        for cut, number in sorted(zip(cuts, range(len(facts)), strict=True)):
            ids += text[done:cut]
            start = start if number else len(ids)
            ids += facts[number].ids
            done = cut
        ids += text[done:room]
        return Planted(Needle(ids, facts[0].question, facts[0].answer, start / context), facts[0], len(facts) - 1)

    def draw(self, text: str) -> list[Fact]:
        """The needle and its distractors: no word stands in two places, and none in the text.

        Raises
        ------
        CorpusError
            There are too few words, or the tokenizer joins what follows a key with the key.
        """
        inside = set(LETTERED.findall(text.lower()))
        free = [word for word in self.words if word not in inside]
        facts: list[Fact] = []
        for _ in range(DRAWS):
            if len(free) < KEY_WORDS + VALUE_WORDS:
                break
            drawn = self.chance.choice(free, size=KEY_WORDS + VALUE_WORDS, replace=False).tolist()
            fact = self.tokenised(" ".join(drawn[:KEY_WORDS]), " ".join(drawn[KEY_WORDS:]))
            if fact is None:
                continue
            facts.append(fact)
            if len(facts) > DISTRACTORS:
                return facts
            free = [word for word in free if word not in drawn]
        raise CorpusError(
            f"no {DISTRACTORS + 1} lines {QUESTION + ANSWER!r} could be made of the corpus' words: {len(free)} of"
            f" {len(self.words)} are left that do not stand in the text, and {len(facts)} lines could be cut into"
            " question and answer by this tokenizer",
            code="corpus.too-few-lines",
        )

    def tokenised(self, key: str, value: str) -> Fact | None:
        """The line as ids; None if its tokens do not end where question and answer do."""
        question, answer, end = (part.format(key=key, value=value) for part in (QUESTION, ANSWER, END))
        prompt, told, whole = (
            list(self.tokenizer(part, add_special_tokens=False).input_ids)
            for part in (question, question + answer, question + answer + end)
        )
        if told[: len(prompt)] != prompt or whole[: len(told)] != told:
            return None
        return Fact(key, value, prompt, told[len(prompt) :], whole[len(told) :])


def fitting(facts: list[Fact], context: int) -> list[Fact]:
    """The first of the lines that together fill no more than half of the context.

    Raises
    ------
    CorpusError
        Not even the needle does.
    """
    filled = np.cumsum([len(fact.ids) for fact in facts])
    if filled[0] > context // 2:
        raise CorpusError(
            f"windows.context is {context} tokens, of which a needle may fill half; with this tokenizer it has"
            f" {filled[0]}: set windows.context to {2 * filled[0]} or more",
            code="corpus.short-context",
        )
    return facts[: int(np.searchsorted(filled, context // 2, side="right"))]


# ---------------------------------------------------------------------------------------- on disk


def needles_hash(items: Sequence[Needle], context: int) -> str:
    """Identity of the items: of all their token ids, and of where one list ends and the next begins."""
    return sha256(json.dumps([context, *([item.context, item.question, item.answer] for item in items)]).encode())


def table(planted: Sequence[Planted]) -> pl.DataFrame:
    """One row per item."""
    rows = [
        {
            "item": number,
            "key": one.fact.key,
            "value": one.fact.value,
            "distractors": one.distractors,
            **one.needle._asdict(),
        }
        for number, one in enumerate(planted)
    ]
    return pl.DataFrame(rows, schema=ROWS)


def describe(
    needles: Needles, params: Params, planted: Sequence[Planted], vocabulary: int, scored: int, text: Text
) -> dict:
    """What ``needles.json`` says."""
    distractors, answers = [one.distractors for one in planted], [len(item.answer) for item in needles.items]
    return {
        "version": VERSION,
        "n": len(needles.items),
        "context": needles.context,
        "model_hash": needles.model_hash,
        "needles_hash": needles.needles_hash,
        "seed": params.windows.seed,
        "source": params.corpus.source if text == "test" else params.corpus.other,
        "line": QUESTION + ANSWER + END,
        "words": vocabulary,
        "distractors": [min(distractors), max(distractors)],
        "answer_tokens": [min(answers), max(answers)],
        "longest": max(len(sequence(item)[0]) for item in needles.items),
        "texts_that_are_scored_windows": scored,
    }


def load(path: Path, model_hash: str) -> Needles:
    """Read the items back and check that they are whole and made for this model.

    Raises
    ------
    CorpusError
        A file is missing or changed, is of another version, or was tokenised for another model.
    """
    record, rows = read_items(path, VERSION, ROWS, model_hash)
    items = tuple(Needle(**row) for row in rows.select(Needle._fields).iter_rows(named=True))
    if needles_hash(items, context := record.get("context")) != (named := record.get("needles_hash")):
        raise CorpusError(
            f"{path} does not match its own hash; it was changed after it was written", code="corpus.changed"
        )
    return Needles(items, context, named, model_hash)


def read_items(path: Path, version: str, schema: pl.Schema, model_hash: str) -> tuple[dict, pl.DataFrame]:
    """The record and the table of retrieval items, of this version and tokenised for this model; see `load`."""
    again = "run `kvlab step needles`"
    try:
        record, rows = read_json(Path(path).with_suffix(".json")), pl.read_parquet(path)
        found, made_for = record["version"], record["model_hash"]
    except (OSError, StorageError, pl.exceptions.PolarsError, KeyError, TypeError) as error:
        raise CorpusError(f"cannot read needles {path}: {error}; {again}", code="corpus.unreadable") from None
    if found != version:
        raise CorpusError(
            f"{path} holds needles of version {found!r}, allowed: {version!r}; {again}", code="corpus.other-version"
        )
    if rows.schema != schema:
        raise CorpusError(
            f"{path} has columns {dict(rows.schema)}, expected {dict(schema)}; {again}", code="corpus.other-columns"
        )
    if made_for != model_hash:
        raise CorpusError(
            f"{path} was tokenised for model {made_for}, this model is {model_hash}", code="corpus.other-model"
        )
    return record, rows
