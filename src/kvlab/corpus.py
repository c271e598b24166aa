"""Text -> fixed token windows for calibration and for scoring, from disjoint documents.

A window is `context` tokens whose K and V are coded and `eval` tokens that are scored behind them.
Documents are joined by the end-of-text token and the stream is cut into consecutive windows, of which
a seeded choice is kept. No document feeds both splits; the hash of the windows is the `corpus_hash`.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvlab.errors import CorpusError
from kvlab.model import check_window, load_tokenizer, resolve
from kvlab.params import Corpus, Params, Windows
from kvlab.records import atomic, forget, from_header, sha256, to_header, write_json

TOKENIZED_AT_ONCE = 1000  # documents; a corpus may be far larger than what its windows need
SHINGLE = 64  # tokens; a run this long in both splits is a copy, not chance
DATASETS_PREFIX = "datasets:"
DOCSTRINGS_RECORD = Path("models/reference/corpus.json")  # what `corpus.source: docstrings` must hash to


@dataclass(frozen=True)
class TokenWindows:
    """Token windows of both splits.

    Attributes
    ----------
    calib, test : numpy.ndarray of int32, shape (windows, context + eval)
    context : int
        Tokens of a window whose K and V are coded.
    corpus_hash : str
        Hash of both arrays and of `context`.
    model_hash : str
        The model whose tokenizer made the ids.
    """

    calib: np.ndarray
    test: np.ndarray
    context: int
    corpus_hash: str
    model_hash: str

    @property
    def eval(self) -> int:
        """Tokens behind the context."""
        return self.test.shape[1] - self.context

    @property
    def labels(self) -> range:
        """Positions that are scored, in every cell: all of the evaluation but its first token.

        The first is predicted by the last *context* token, which the snapshot protocol answers from the
        clean prefill; leaving it out keeps the labels of both protocols the same.
        """
        return range(self.context + 1, self.test.shape[1])


def build(params: Params, out: Path) -> TokenWindows:
    """Read the corpus, cut it, check it and write ``windows.safetensors`` with its ``.json``.

    Raises
    ------
    CorpusError
        The text is missing or too short, or a document would feed both splits.
    """
    info = resolve(params.model)
    check_window(info, params.windows.length)
    documents = read_documents(params.corpus)
    shared = set(map(text_hash, documents["calib"])) & set(map(text_hash, documents["test"]))
    if shared:
        raise CorpusError(f"{len(shared)} documents are in the calibration and in the test split")
    tokenizer = load_tokenizer(info)
    arrays = {
        split: cut(stream(documents[split], tokenizer), params.windows, split, bos(tokenizer))
        for split in ("calib", "test")
    }
    windows = TokenWindows(
        **arrays,
        context=params.windows.context,
        corpus_hash=windows_hash(arrays["calib"], arrays["test"], params.windows.context),
        model_hash=info.model_hash,
    )
    refuse_shared_windows(windows)
    forget(out)
    save(windows, out)
    write_json(Path(out).with_suffix(".json"), describe(windows, params, documents))
    return windows


def read_documents(corpus: Corpus) -> dict[str, list[str]]:
    """Documents by split (``calib``, ``test``), for any kind of source."""
    if corpus.source == "docstrings":
        from kvlab.corpus_docstrings import load_checked

        splits = load_checked(DOCSTRINGS_RECORD)
        return {split: [document.text for document in splits[split]] for split in ("calib", "test")}
    if corpus.source.startswith(DATASETS_PREFIX):
        return dataset_documents(corpus)
    return file_documents(corpus.source)


def file_documents(source: str) -> dict[str, list[str]]:
    """Paragraphs of the named text files, without repetition: the first half calibrates, the second tests.

    Halves rather than a random choice, because neighbouring paragraphs of one text share its words.
    """
    paths = sorted(glob.glob(source, recursive=True))
    if not paths:
        raise CorpusError(
            f"corpus.source {source!r} matches no file; give a file, a glob, `docstrings` or `datasets:ID`"
        )
    try:
        texts = [Path(path).read_text(encoding="utf-8") for path in paths if Path(path).is_file()]
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"corpus.source {source!r} is not readable text: {error}") from None
    paragraphs = list(dict.fromkeys(p.strip() for text in texts for p in text.split("\n\n") if p.strip()))
    middle = sum(map(len, paragraphs)) / 2
    ends = np.cumsum([len(p) for p in paragraphs])
    cut_at = int(np.searchsorted(ends, middle))
    return {"calib": paragraphs[:cut_at], "test": paragraphs[cut_at:]}


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
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = [np.empty(0, dtype=np.int32)]
    for texts in batched(documents, TOKENIZED_AT_ONCE):
        ids = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
        parts += [np.array([*document, *end], dtype=np.int32) for document in ids]
    return np.concatenate(parts)


def batched(items: Iterable, size: int) -> Iterable[tuple]:
    """Tuples of `size` items, the last one shorter (itertools has it from Python 3.12 on)."""
    source = iter(items)
    return iter(lambda: tuple(islice(source, size)), ())


def cut(ids: np.ndarray, windows: Windows, split: str, prefix: list[int]) -> np.ndarray:
    """Consecutive windows of a stream, of which a seeded choice is kept, shape (windows, length)."""
    body = windows.length - len(prefix)
    available, wanted = len(ids) // body, getattr(windows, split)
    if available < wanted:
        raise CorpusError(
            f"the corpus is too short: its {split} split has {len(ids)} tokens, {available} windows of"
            f" {windows.length}, and windows.{split} asks for {wanted}"
        )
    chosen = np.sort(np.random.default_rng(windows.seed).permutation(available)[:wanted])
    cuts = ids[: available * body].reshape(available, body)[chosen]
    head = np.tile(np.array(prefix, dtype=np.int32), (wanted, 1))
    return np.ascontiguousarray(np.concatenate([head, cuts], axis=1))


def refuse_shared_windows(windows: TokenWindows) -> None:
    """A scored window that the calibration has seen makes every number worthless."""
    seen = {row.tobytes() for row in windows.calib}
    if any(row.tobytes() in seen for row in windows.test):
        raise CorpusError("a calibration window is also a test window; the corpus repeats itself")


def overlap(windows: TokenWindows) -> float:
    """Fraction of the scored windows' 64-token runs that also stand in the calibration windows."""
    size = min(SHINGLE, windows.test.shape[1])

    def shingles(rows: np.ndarray) -> Iterable[bytes]:
        return (row[i : i + size].tobytes() for row in rows for i in range(row.size - size + 1))

    seen = set(shingles(windows.calib))
    hits = [run in seen for run in shingles(windows.test)]
    return float(np.mean(hits))


def windows_hash(calib: np.ndarray, test: np.ndarray, context: int) -> str:
    """Identity of the windows."""
    return sha256(b"calib", calib.tobytes(), b"test", test.tobytes(), str(context).encode())


def describe(windows: TokenWindows, params: Params, documents: dict[str, list[str]]) -> dict:
    """What ``windows.json`` says."""
    return {
        "corpus_hash": windows.corpus_hash,
        "model_hash": windows.model_hash,
        "source": params.corpus.source,
        "context": windows.context,
        "eval": windows.eval,
        "windows": {"calib": len(windows.calib), "test": len(windows.test)},
        "documents": {split: len(texts) for split, texts in documents.items()},
        "scored_labels": [windows.labels.start, windows.labels.stop - 1],
        "shared_run_fraction": overlap(windows),
        "shared_run_tokens": SHINGLE,
    }


def save(windows: TokenWindows, out: Path) -> None:
    """Write the windows atomically."""
    metadata = {
        "context": windows.context,
        "corpus_hash": windows.corpus_hash,
        "model_hash": windows.model_hash,
    }
    with atomic(out) as temporary:
        save_file({"calib": windows.calib, "test": windows.test}, temporary, metadata=to_header(metadata))


def load(path: Path, model_hash: str) -> TokenWindows:
    """Read windows back and check that they are whole and made for this model.

    Raises
    ------
    CorpusError
        The file is missing or changed, or was tokenised for another model.
    """
    try:
        with safe_open(path, "np") as file:
            metadata, calib, test = from_header(file.metadata()), file.get_tensor("calib"), file.get_tensor("test")
        windows = TokenWindows(calib, test, metadata["context"], metadata["corpus_hash"], metadata["model_hash"])
    except (OSError, SafetensorError, KeyError) as error:
        raise CorpusError(f"cannot read windows {path}: {error}; run `kvlab corpus`") from None
    if windows_hash(calib, test, windows.context) != windows.corpus_hash:
        raise CorpusError(f"{path} does not match its own hash; it was changed after it was written")
    if windows.model_hash != model_hash:
        raise CorpusError(f"{path} was tokenised for model {windows.model_hash}, this model is {model_hash}")
    return windows
