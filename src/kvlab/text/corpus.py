"""Text -> fixed token windows for calibration and for scoring, from disjoint documents.

A window is `context` tokens whose K and V are coded and `eval` tokens that are scored after them.
Documents are joined by the end-of-text token and the stream is cut into consecutive windows, of which
a seeded choice is kept. No document feeds both splits; the hash of the windows is the `corpus_hash`.
Beside the test split another text may be scored, of a domain that the calibration does not know.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvlab.core.errors import CorpusError, StorageError
from kvlab.core.model import check_window, load_tokenizer, resolve
from kvlab.core.params import Corpus, Params, Windows
from kvlab.core.recipe import Text
from kvlab.core.records import atomic, forget, from_header, read_json, sha256, to_header, write_json, write_table
from kvlab.text import encyclopedia, licences

TOKENIZED_AT_ONCE = 1000  # documents; a corpus may be far larger than what its windows need
SHINGLE = 64  # tokens; a run this long in both splits is a copy, not chance
DATASETS_PREFIX = "datasets:"
OTHERS = {"encyclopedia": encyclopedia, "licences": licences}  # what `corpus.other` may name, beside files
DOCUMENTS = pl.Schema({"split": pl.String, "text": pl.String})  # in the order in which the windows are cut
DOCSTRINGS_RECORD = Path("models/reference/corpus.json")  # what `corpus.source: docstrings` must hash to


@dataclass(frozen=True)
class TokenWindows:
    """Token windows of both splits, and of the other text.

    Attributes
    ----------
    calib, test : numpy.ndarray of int32, shape (windows, context + eval)
    context : int
        Tokens of a window whose K and V are coded.
    corpus_hash : str
        Hash of all arrays and of `context`.
    model_hash : str
        The model whose tokenizer made the ids.
    other : numpy.ndarray of int32 or None
        Windows of `corpus.other`, shaped like the others; None without one.
    documents : dict of str to tuple of int
        By scored text, which document most tokens of each window are of; empty for windows written without it.
    """

    calib: np.ndarray
    test: np.ndarray
    context: int
    corpus_hash: str
    model_hash: str
    other: np.ndarray | None = None
    documents: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def scored(self, text: Text) -> np.ndarray:
        """The windows of a text, or of the calibration split; `CorpusError` when there is no such text."""
        if text != "other":
            return {"test": self.test, "calib": self.calib}[text]
        if self.other is None:
            raise CorpusError(
                "these windows hold no other text; name one in `corpus.other` and"
                " run `kvlab step corpus`, or leave 'other'"
                " out of `ladder.texts`",
                code="corpus.no-other-text",
            )
        return self.other

    @property
    def eval(self) -> int:
        """Tokens after the context."""
        return self.test.shape[1] - self.context

    @property
    def labels(self) -> range:
        """Positions that are scored, in every cell: all of the evaluation but its first token.

        The first is predicted by the last *context* token, which the snapshot protocol answers from the
        clean prefill; leaving it out keeps the labels of both protocols the same.
        """
        return range(self.context + 1, self.test.shape[1])


def build(params: Params, out: Path, texts: Path | None = None) -> TokenWindows:
    """Cut the corpus, check it and write ``windows.safetensors`` with its ``.json``.

    Parameters
    ----------
    texts : Path, optional
        What `write_texts` wrote; without, the corpus is read again.

    Raises
    ------
    CorpusError
        A text is missing or too short, or a document would feed the calibration and a scored text.
    """
    info = resolve(params.model)
    check_window(info, params.windows.length)
    documents, facts = documents_of(params, texts)
    refuse_shared_documents(documents)
    tokenizer = load_tokenizer(info)
    cut_from = {split: tokenized(texts, tokenizer) for split, texts in documents.items()}
    streams = {split: ids for split, (ids, _) in cut_from.items()}
    prefix = bos(tokenizer)
    arrays = {split: cut(ids, params.windows, split, prefix) for split, ids in streams.items() if split != "test"}
    arrays["test"] = in_turn(params, streams, prefix)
    for split, rows in arrays.items():
        refuse_alike(rows[:, : params.windows.context], prefix, f"the corpus ({split})")
    windows = TokenWindows(
        **arrays,
        context=params.windows.context,
        corpus_hash=windows_hash(arrays, params.windows.context),
        model_hash=info.model_hash,
        documents=window_documents(params, cut_from, prefix),
    )
    refuse_shared_windows(windows)
    forget(out)
    save(windows, out)
    write_json(Path(out).with_suffix(".json"), describe(windows, params, documents) | facts)
    return windows


def write_texts(params: Params, out: Path) -> None:
    """Read the corpus, of whatever model, and write its documents with a ``.json`` that says which they are.

    Raises
    ------
    CorpusError
        A text is missing or cannot be read.
    """
    documents, facts = documents_of(params)
    forget(out)
    named = [(split, text) for split, texts in documents.items() for text in texts]
    write_table(out, pl.DataFrame(named, schema=DOCUMENTS, orient="row"))
    write_json(Path(out).with_suffix(".json"), {"corpus": read_from(params), "facts": facts})


def documents_of(params: Params, texts: Path | None = None) -> tuple[dict[str, list[str]], dict]:
    """Documents by split, and what ``windows.json`` says of the other text; from the corpus, or as `texts` keeps them.

    Raises
    ------
    CorpusError
        A text is missing, or `texts` cannot be read or is of another corpus.
    """
    if texts is None:
        other, facts = read_other(params.corpus)
        return read_documents(params.corpus) | ({} if params.corpus.other is None else {"other": other}), facts
    try:
        said = read_json(Path(texts).with_suffix(".json"))
        corpus, facts = said["corpus"], said["facts"]
        table = pl.read_parquet(texts).match_to_schema(DOCUMENTS)
    except (OSError, StorageError, KeyError, TypeError, pl.exceptions.PolarsError) as error:
        raise CorpusError(
            f"cannot read texts {texts}: {error}; run `kvlab step texts`", code="corpus.unreadable"
        ) from None
    if corpus != read_from(params):
        raise CorpusError(
            f"{texts} holds the texts of {corpus}, and `corpus` names {read_from(params)}; run `kvlab step texts`",
            code="corpus.other-texts",
        )
    splits = ("calib", "test") if params.corpus.other is None else ("calib", "test", "other")
    return {split: table.filter(pl.col("split") == split)["text"].to_list() for split in splits}, facts


def read_from(params: Params) -> dict[str, Any]:
    """What of the parameters decides which documents there are."""
    return params.corpus.model_dump(mode="json", exclude={"scored"})


def read_documents(corpus: Corpus) -> dict[str, list[str]]:
    """Documents by split (``calib``, ``test``), for any kind of source."""
    if corpus.source == "docstrings":
        from kvlab.text.docstrings import load_checked

        splits = load_checked(DOCSTRINGS_RECORD)
        return {split: [document.text for document in splits[split]] for split in ("calib", "test")}
    if corpus.source.startswith(DATASETS_PREFIX):
        return dataset_documents(corpus)
    return file_documents(corpus.source)


def read_other(corpus: Corpus) -> tuple[list[str], dict]:
    """Documents of the other text, and what ``windows.json`` says of it; both empty without one."""
    if corpus.other is None:
        return [], {}
    if corpus.other in OTHERS:
        reader = OTHERS[corpus.other]
        found = reader.extract()
        return [document.text for document in found], {corpus.other: reader.describe(found)}
    return paragraphs_of(corpus.other, "corpus.other", " or ".join(f"`{name}`" for name in OTHERS)), {}


def file_documents(source: str) -> dict[str, list[str]]:
    """Paragraphs of the named text files: the first half calibrates, the second tests.

    Halves rather than a random choice, because neighbouring paragraphs of one text share its words.
    """
    paragraphs = paragraphs_of(source, "corpus.source", "`docstrings` or `datasets:ID`")
    middle = sum(map(len, paragraphs)) / 2
    ends = np.cumsum([len(p) for p in paragraphs])
    cut_at = int(np.searchsorted(ends, middle))
    return {"calib": paragraphs[:cut_at], "test": paragraphs[cut_at:]}


def paragraphs_of(source: str, parameter: str, instead: str) -> list[str]:
    """Paragraphs of the named text files, without repetition."""
    paths = sorted(glob.glob(source, recursive=True))
    if not paths:
        raise CorpusError(
            f"{parameter} {source!r} matches no file; give a file, a glob, {instead}", code="corpus.no-file"
        )
    try:
        texts = [Path(path).read_text(encoding="utf-8") for path in paths if Path(path).is_file()]
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{parameter} {source!r} is not readable text: {error}") from None
    return list(dict.fromkeys(p.strip() for text in texts for p in text.split("\n\n") if p.strip()))


def dataset_documents(corpus: Corpus) -> dict[str, list[str]]:
    """Rows of a Hugging Face dataset; its own splits keep calibration and test apart."""
    from datasets import load_dataset
    from huggingface_hub.errors import HfHubHTTPError

    name, _, config = corpus.source.removeprefix(DATASETS_PREFIX).partition("/config=")
    documents = {}
    for split in ("calib", "test"):
        theirs = getattr(corpus.splits, split)
        try:
            rows = load_dataset(name, config or None, split=theirs)
        except (OSError, ValueError, RuntimeError, HfHubHTTPError) as error:
            raise CorpusError(f"dataset {name!r} (split {theirs!r}) could not be loaded: {error}") from error
        if corpus.text_column not in rows.column_names:
            raise CorpusError(f"dataset {name!r} has no column {corpus.text_column!r}; it has {rows.column_names}")
        documents[split] = list(dict.fromkeys(text for text in rows[corpus.text_column] if text.strip()))
    seen = set(map(text_hash, documents["test"]))
    documents["calib"] = [text for text in documents["calib"] if text_hash(text) not in seen]
    return documents


def text_hash(text: str) -> str:
    """sha256 of a document."""
    return hashlib.sha256(text.encode()).hexdigest()


def bos(tokenizer) -> list[int]:
    """The tokens that the tokenizer itself puts before every text (one, or none)."""
    return list(tokenizer("").input_ids)[:1]


def stream(documents: Iterable[str], tokenizer) -> np.ndarray:
    """All documents as one stream of ids, each closed by the end-of-text token."""
    return tokenized(documents, tokenizer)[0]


def tokenized(documents: Iterable[str], tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The stream of all documents, int32 [tokens], and where in it each document ends, int64 [documents]."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = [np.empty(0, dtype=np.int32)]
    for texts in batched(documents, TOKENIZED_AT_ONCE):
        ids = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
        parts += [np.array([*document, *end], dtype=np.int32) for document in ids]
    return np.concatenate(parts), np.cumsum([part.size for part in parts[1:]], dtype=np.int64)


def batched(items: Iterable, size: int) -> Iterable[tuple]:
    """Tuples of `size` items, the last one shorter (itertools has it from Python 3.12 on)."""
    source = iter(items)
    return iter(lambda: tuple(islice(source, size)), ())


def cut(ids: np.ndarray, windows: Windows, split: str, prefix: list[int], count: int | None = None) -> np.ndarray:
    """Consecutive windows of a stream, of which a seeded choice is kept, shape (windows, length).

    `count` is how many, if not as many as `windows` says of the split.
    """
    body = windows.length - len(prefix)
    chosen = choose(ids, windows, split, body, count)
    cuts = ids[: len(ids) // body * body].reshape(-1, body)[chosen]
    head = np.tile(np.array(prefix, dtype=np.int32), (len(chosen), 1))
    return np.ascontiguousarray(np.concatenate([head, cuts], axis=1))


def choose(ids: np.ndarray, windows: Windows, split: str, body: int, count: int | None = None) -> np.ndarray:
    """Which consecutive windows of `body` tokens of a stream are kept, ascending; as `cut` otherwise."""
    available, wanted = len(ids) // body, getattr(windows, split) if count is None else count
    skipped = 0 if split == "calib" else windows.skip
    if available < skipped + wanted:
        raise CorpusError(
            f"the corpus is too short: its {split} {'text' if split == 'other' else 'split'} has {len(ids)} tokens,"
            f" {available} windows of {windows.length}, and windows.{split} asks for {wanted}"
            + (f" after windows.skip, {skipped}" if skipped else ""),
            code="corpus.too-short",
        )
    return np.sort(np.random.default_rng(windows.seed).permutation(available)[skipped : skipped + wanted])


def in_turn(params: Params, streams: dict[str, np.ndarray], prefix: list[int]) -> np.ndarray:
    """The scored windows, from one text after the other, shape (windows.test, length)."""
    texts, total = params.corpus.scored, params.windows.test
    found = np.empty((total, params.windows.length), dtype=np.int32)
    for place, text in enumerate(texts):
        share = len(range(place, total, len(texts)))
        found[place :: len(texts)] = cut(streams[text], params.windows, text, prefix, share)
    return found


def window_documents(
    params: Params, cut_from: dict[str, tuple[np.ndarray, np.ndarray]], prefix: list[int]
) -> dict[str, tuple[int, ...]]:
    """Which document most tokens of each scored window are of, by scored text.

    A window that reaches over the end of a document is counted to the one that fills most of it, the earlier of two
    equals. Documents of several texts that take turns in the test split have different numbers.
    """
    body = params.windows.length - len(prefix)

    def of(text: str, split: str, count: int) -> np.ndarray:
        ids, ends = cut_from[text]
        chosen = choose(ids, params.windows, split, body, count)
        within = np.searchsorted(ends, chosen[:, None] * body + np.arange(body), side="right")
        return np.array([np.bincount(row).argmax() for row in within])

    texts, total, before = params.corpus.scored, params.windows.test, 0
    test = np.empty(total, dtype=np.int64)
    for place, text in enumerate(texts):
        test[place :: len(texts)] = before + of(text, text, len(range(place, total, len(texts))))
        before += len(cut_from[text][1])
    found = {"test": test} | ({"other": of("other", "other", params.windows.other)} if "other" in cut_from else {})
    return {text: tuple(numbers.tolist()) for text, numbers in found.items()}


def refuse_shared_documents(documents: dict[str, list[str]]) -> None:
    """`CorpusError` when the calibration reads a document that is scored."""
    calibrating = set(map(text_hash, documents["calib"]))
    for split in documents.keys() - {"calib"}:
        shared = calibrating & set(map(text_hash, documents[split]))
        if shared:
            text = "the other text" if split == "other" else "the test split"
            raise CorpusError(
                f"{len(shared)} documents are in the calibration and in {text}", code="corpus.shared-documents"
            )


def refuse_alike(rows: np.ndarray, prefix: list[int], name: str) -> None:
    """`CorpusError` for a window of one token over and over: its K and V are all alike, and no codec costs anything.

    Parameters
    ----------
    rows : ndarray of int, shape (windows, length)
    prefix : list of int
        What the tokenizer puts before every text; it does not count.
    name : str
        Of the text.
    """
    body = rows[:, len(prefix) :]
    alike = np.flatnonzero((body == body[:, :1]).all(axis=1)) if body.shape[1] > 1 else []
    if len(alike):
        number = int(alike[0])
        raise CorpusError(
            f"window {number} of {name} holds token {body[number, 0]} {body.shape[1]} times and nothing else (blank"
            " lines?), which says nothing about a codec; give a text without it"
        )


def refuse_shared_windows(windows: TokenWindows) -> None:
    """A scored window that the calibration has seen makes every number worthless."""
    seen = {row.tobytes() for row in windows.calib}
    for name, rows in scored_arrays(windows).items():
        if any(row.tobytes() in seen for row in rows):
            raise CorpusError(
                f"a calibration window is also a window of {name!r}; the corpus repeats itself",
                code="corpus.shared-windows",
            )


def overlap(windows: TokenWindows, text: Text = "test") -> float:
    """Fraction of a scored text's 64-token runs that also stand in the calibration windows."""
    size = min(SHINGLE, windows.test.shape[1])

    def shingles(rows: np.ndarray) -> Iterable[bytes]:
        return (row[i : i + size].tobytes() for row in rows for i in range(row.size - size + 1))

    seen = set(shingles(windows.calib))
    hits = [run in seen for run in shingles(windows.scored(text))]
    return float(np.mean(hits))


def scored_arrays(windows: TokenWindows) -> dict[Text, np.ndarray]:
    """The windows that may be scored, by text."""
    return {"test": windows.test} | ({} if windows.other is None else {"other": windows.other})


def windows_hash(arrays: dict[str, np.ndarray], context: int) -> str:
    """Identity of the windows."""
    named = (part for split in sorted(arrays) for part in (split.encode(), arrays[split].tobytes()))
    return sha256(*named, str(context).encode())


def describe(windows: TokenWindows, params: Params, documents: dict[str, list[str]]) -> dict:
    """What ``windows.json`` says."""
    return {
        "corpus_hash": windows.corpus_hash,
        "model_hash": windows.model_hash,
        "source": params.corpus.source,
        "other": params.corpus.other,
        "context": windows.context,
        "eval": windows.eval,
        "scored": list(params.corpus.scored),
        "windows": {"calib": len(windows.calib)} | {text: len(rows) for text, rows in scored_arrays(windows).items()},
        "documents": {split: len(texts) for split, texts in documents.items()},
        "window_documents": {text: list(numbers) for text, numbers in windows.documents.items()},
        "scored_labels": [windows.labels.start, windows.labels.stop - 1],
        "shared_run_fraction": {text: overlap(windows, text) for text in scored_arrays(windows)},
        "shared_run_tokens": SHINGLE,
    }


def save(windows: TokenWindows, out: Path) -> None:
    """Write the windows atomically."""
    metadata = {
        "context": windows.context,
        "corpus_hash": windows.corpus_hash,
        "model_hash": windows.model_hash,
        "documents": windows.documents,
    }
    with atomic(out) as temporary:
        save_file({"calib": windows.calib, **scored_arrays(windows)}, temporary, metadata=to_header(metadata))


def load(path: Path, model_hash: str) -> TokenWindows:
    """Read windows back and check that they are whole and made for this model.

    Raises
    ------
    CorpusError
        The file is missing or changed, or was tokenised for another model.
    """
    try:
        with safe_open(path, "np") as file:
            names = set(file.keys())
            metadata, arrays = from_header(file.metadata()), {name: file.get_tensor(name) for name in names}
        identity = {name: metadata[name] for name in ("context", "corpus_hash", "model_hash")}
        documents = {text: tuple(numbers) for text, numbers in metadata.get("documents", {}).items()}
        splits = {name: arrays.get(name) for name in ("calib", "test", "other")}
        windows = TokenWindows(**splits, **identity, documents=documents)
    except (OSError, SafetensorError, KeyError) as error:
        raise CorpusError(
            f"cannot read windows {path}: {error}; run `kvlab step corpus`", code="corpus.unreadable"
        ) from None
    if windows_hash(arrays, windows.context) != windows.corpus_hash:
        raise CorpusError(
            f"{path} does not match its own hash; it was changed after it was written", code="corpus.changed"
        )
    if windows.model_hash != model_hash:
        raise CorpusError(
            f"{path} was tokenised for model {windows.model_hash}, this model is {model_hash}",
            code="corpus.other-model",
        )
    return windows
