"""Which consecutive windows of a stream of documents are kept, and which document each of them is of."""

from __future__ import annotations

import numpy as np

from kvlab.core.errors import CorpusError
from kvlab.core.params import Params, Windows


def choose(ids: np.ndarray, windows: Windows, split: str, body: int, count: int | None = None) -> np.ndarray:
    """Which consecutive windows of `body` tokens of a stream are kept, ascending; as `cut` otherwise."""
    available, wanted = len(ids) // body, getattr(windows, split) if count is None else count
    if available < wanted:
        raise CorpusError(
            f"the corpus is too short: its {split} {'text' if split == 'other' else 'split'} has {len(ids)} tokens,"
            f" {available} windows of {windows.length}, and windows.{split} asks for {wanted}",
            code="corpus.too-short",
        )
    return np.sort(np.random.default_rng(windows.seed).permutation(available)[:wanted])


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
