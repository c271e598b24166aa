"""Token windows of a text that a person names, and of the docstrings of installed packages to calibrate on.

Apart from `corpus`, which cuts the texts of a whole study: here there is one text, as many windows as it has are
taken, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kvlab.core.errors import CorpusError
from kvlab.text.corpus import SHINGLE, bos, refuse_alike, stream

PACKAGES = ("torch", "numpy")  # what kvlab itself needs, so it is always there
FEWEST = 2  # windows: an interval over windows needs two


def read_text(path: Path) -> str:
    """A text file.

    Raises
    ------
    CorpusError
        It is missing, is no UTF-8, or holds nothing but white space.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise CorpusError(f"{path} holds no text")
    return text


def refuse_short(path: Path, text: str, length: int) -> None:
    """`CorpusError` for a text that cannot have two windows of `length` tokens: a token takes at least one byte."""
    size = len(text.encode())
    if size < FEWEST * length:
        raise CorpusError(
            f"{path} has {size} bytes, too few for {FEWEST} windows of {length} tokens; give a longer text or smaller"
            " windows"
        )


def docstrings() -> list[str]:
    """Docstrings of installed packages, of the side that the study of `corpus.source: docstrings` calibrates on."""
    from kvlab.text.docstrings import extract, split

    return [document.text for document in split(extract(PACKAGES))["calib"]]


def windows_of(
    texts: Iterable[str],
    tokenizer,
    length: int,
    most: int,
    name: str,
    coded: int | None = None,
    exactly: str | None = None,
) -> np.ndarray:
    """Windows of texts, at most so many, evenly spread over all that there are.

    Parameters
    ----------
    texts : iterable of str
        Documents, joined by the end-of-text token as in `corpus.stream`.
    tokenizer : transformers tokenizer
    length, most : int
        Tokens of a window, and windows.
    name : str
        Of the text, for messages.
    coded : int, optional
        Of a window's first tokens, whose K and V are looked at; all of them if not given.
    exactly : str, optional
        The flag by which somebody wanted just so many; fewer are refused then.

    Returns
    -------
    numpy.ndarray of int32, shape (windows, length)

    Raises
    ------
    CorpusError
        There are fewer than two windows, or fewer than were wanted, or one is of one token alone.
    """
    ids, prefix = stream(texts, tokenizer), bos(tokenizer)
    body = length - len(prefix)
    available = len(ids) // body
    if available < FEWEST:
        raise CorpusError(
            f"{name} has {len(ids)} tokens, {available} windows of {length}; at least {FEWEST} are needed: give a"
            " longer text or smaller windows"
        )
    if exactly and available < most:
        raise CorpusError(
            f"{exactly} {most}: {name} has {len(ids)} tokens, which are {available} windows of {length}; give"
            f" {exactly} {available}, a longer text or smaller windows"
        )
    count = min(most, available)
    chosen = [available * number // count for number in range(count)]
    rows = ids[: available * body].reshape(available, body)[chosen]
    head = np.tile(np.array(prefix, dtype=np.int32), (count, 1))
    windows = np.ascontiguousarray(np.concatenate([head, rows], axis=1))
    refuse_alike(windows[:, :coded], prefix, name)
    return windows


def refuse_overlap(scored: np.ndarray, calibrating: np.ndarray, names: Sequence[str]) -> None:
    """`CorpusError` when a run of `SHINGLE` tokens stands in the scored and in the calibration windows.

    Numbers on text that the calibration has seen are too good. `names` are those of the two texts.
    """
    size = min(SHINGLE, scored.shape[1], calibrating.shape[1])

    def runs(rows: np.ndarray) -> set[bytes]:
        return {row[i : i + size].tobytes() for row in rows for i in range(row.size - size + 1)}

    shared = len(runs(scored) & runs(calibrating))
    if shared:
        raise CorpusError(
            f"{names[0]} and {names[1]} share {shared} runs of {size} tokens: what is scored must not have been"
            " calibrated on; give another --calib-text"
        )
