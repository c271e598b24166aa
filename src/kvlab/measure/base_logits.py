"""What llama.cpp's ``llama-perplexity --kl-divergence-base FILE`` writes: log-probabilities in 16 bits, chunk by chunk.

By its own source (tools/perplexity/perplexity.cpp, revision 050fc7f3). All is little-endian:

    8 bytes ``_logits_``, then int32: tokens of a chunk, size of the vocabulary, number of chunks
    int32 [chunks, tokens of a chunk]: the text; the model was given its first token of a text in the first one's place
    of each chunk, for the tokens from half a chunk to the last but one, a row: float32 step, float32 least
    log-probability, uint16 [vocabulary], filled up to an even number

A log-probability is the least one and so many steps. Logits more than 16 below the largest are stored as the least,
so that what lies there is no number of the model's; llama.cpp leaves out what has a log-probability of -16 or less, and
so does `divergence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from kvlab.core.errors import StorageError

MAGIC = b"_logits_"
LEAST = -16.0  # log-probability from which on a token counts
LEAST_CONTEXT = 4
NO_FILE, CUT = "storage.no-base-logits", "storage.base-logits-size"


@dataclass(frozen=True)
class BaseLogits:
    """A file of llama.cpp's, of which nothing but the header has been read.

    Parameters
    ----------
    path : Path
    context, vocabulary, chunks : int
        Tokens of a chunk, size of the vocabulary, number of chunks.
    """

    path: Path
    context: int
    vocabulary: int
    chunks: int

    @classmethod
    def read(cls, path: Path) -> BaseLogits:
        """The header, held against the size of the file.

        Raises
        ------
        StorageError
            It is another kind of file, or cut, or longer than it should be.
        """
        with path.open("rb") as file:
            magic, header = file.read(len(MAGIC)), np.frombuffer(file.read(12), "<i4")
        if magic != MAGIC or header.size < 3 or header[0] < LEAST_CONTEXT or min(header[1:]) < 1:
            raise StorageError(
                f"{path} is not what `llama-perplexity --kl-divergence-base` writes; it begins with {MAGIC.decode()}",
                code=NO_FILE,
            )
        found = cls(path, *map(int, header))
        due, size = found._place(found.chunks), path.stat().st_size
        if size != due:
            raise StorageError(
                f"{path} has {size} bytes, and {found.chunks} chunks of {found.context} tokens take {due}: it was not"
                " written to its end, or is of another version of llama.cpp",
                code=CUT,
            )
        return found

    @property
    def first(self) -> int:
        """The first token of a chunk whose successor is predicted."""
        return self.context // 2

    @property
    def rows(self) -> int:
        """Predictions of a chunk."""
        return self.context - 1 - self.first

    @property
    def _width(self) -> int:
        """Numbers of 16 bits in a row: a step and a least log-probability of two each, and the vocabulary made even."""
        return 4 + 2 * ((self.vocabulary + 1) // 2)

    def _place(self, chunk: int) -> int:
        """Where a chunk's rows begin."""
        return len(MAGIC) + 12 + 4 * self.chunks * self.context + 2 * chunk * self.rows * self._width

    @cached_property
    def tokens(self) -> np.ndarray:
        """The text, int32 [chunks, tokens of a chunk].

        Raises
        ------
        StorageError
            A token is outside of the vocabulary.
        """
        count = self.chunks * self.context
        found = np.fromfile(self.path, "<i4", count, offset=len(MAGIC) + 12).reshape(self.chunks, self.context)
        if found.min() < 0 or found.max() >= self.vocabulary:
            raise StorageError(
                f"{self.path} holds tokens {found.min()} to {found.max()}, and its vocabulary has {self.vocabulary}",
                code=CUT,
            )
        return found

    def log_probabilities(self, chunk: int) -> np.ndarray:
        """Those of a chunk, float64 [rows, vocabulary]; minus infinity where the file holds no number of the model's.

        Raises
        ------
        StorageError
            A row's step or least log-probability is no number, or its probabilities do not sum to one.
        """
        shape = self.rows, self._width
        words = np.fromfile(self.path, "<u2", shape[0] * shape[1], offset=self._place(chunk)).reshape(shape)
        step, least = np.ascontiguousarray(words[:, :4]).view("<f4").astype(np.float64).T[:, :, None]
        found = least + step * words[:, 4 : 4 + self.vocabulary]
        found = np.where(found > LEAST, found, -np.inf)
        with np.errstate(over="ignore", invalid="ignore"):
            mass = np.exp(found).sum(1)
        allowed = 0.001 + self.vocabulary * np.exp(LEAST)
        if not (np.abs(mass - 1) <= allowed).all():
            raise StorageError(
                f"{self.path}: probabilities of chunk {chunk} sum to {mass.min():.3g} to {mass.max():.3g} and not to 1",
                code=CUT,
            )
        return found


def divergence(base: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL divergence of each row as llama.cpp adds it up, over the tokens that the file has a number of.

    Parameters
    ----------
    base : float64 [rows, vocabulary]
        Of `BaseLogits.log_probabilities`.
    other : float64 [rows, vocabulary]
        Log-probabilities of another prediction of the same.

    Returns
    -------
    float64 [rows], nats
        A few parts in a million below zero where both are equal up to the file's steps.
    """
    known = np.isfinite(base)
    return np.where(known, np.exp(base) * (np.where(known, base, 0.0) - other), 0.0).sum(1)
