"""Answers to questions that are nearly the same, never across models or mechanisms.

The key of a space is (model, mechanism, sampling): an answer that was made over a coded cache is never served as an
exact one. Lookup is one product of all kept directions with the asked one, which is exact; a space of a million wants
an index of another kind. The threshold is to be chosen on pairs of questions that are known to want one answer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.core.errors import UserError


@dataclass(frozen=True)
class Space:
    """What an answer depends on beside the question.

    Parameters
    ----------
    model : str
        Hash of the weights.
    mechanism : str
        Recipe of the cache, or ``exact``.
    sampling : hashable
        Temperature, seed and the like.
    """

    model: str
    mechanism: str
    sampling: Hashable = ()


class _StoredAnswers:
    def __init__(self, capacity: int, size: int):
        self.rows = np.zeros((capacity, size), np.float32)
        self.used = np.full(capacity, -1, np.int64)  # by the counter; -1: empty, and its row is zero
        self.until = np.full(capacity, np.inf)
        self.soonest = np.inf
        self.answers: list[str | None] = [None] * capacity

    def forget(self, now: float) -> None:
        """Empty the places of answers that are no longer good."""
        if now >= self.soonest:
            gone = self.until <= now
            self.rows[gone], self.used[gone], self.until[gone] = 0.0, -1, np.inf
            self.soonest = float(self.until.min())


class SemanticCache:
    """See the module.

    Parameters
    ----------
    size : int
        Of an embedding.
    threshold : float
        Cosine from which two questions are one.
    capacity : int
        Answers of a space; the one that was used longest ago goes first.
    keep : float
        Seconds that an answer is good for.
    """

    def __init__(self, size: int, threshold: float = 0.95, capacity: int = 256, keep: float = np.inf):
        if size < 1 or capacity < 1 or not 0 < threshold <= 1:
            raise UserError(
                f"size {size}, capacity {capacity}, threshold {threshold:g}; allowed: 1 or more, and 0 to 1"
            )
        self.size, self.threshold, self.capacity, self.keep = size, threshold, capacity, keep
        self.spaces: dict[Space, _StoredAnswers] = {}
        self.hits = self.misses = self._counter = 0

    def _direction(self, embedding: ArrayLike) -> NDArray | None:
        """The embedding at length 1; None for one that has no direction."""
        found = np.asarray(embedding, np.float64)
        if found.shape != (self.size,):
            raise UserError(f"an embedding of {found.shape}; allowed: ({self.size},)", code="user.embedding-shape")
        peak = float(np.abs(found).max())
        if not 0 < peak < math.inf:
            return None
        found = found / peak  # no square of it is too large or too small
        return (found / math.sqrt(found @ found)).astype(np.float32)

    def _nearest(self, stored: _StoredAnswers, direction: NDArray, now: float) -> tuple[int, float]:
        stored.forget(now)
        cosine = stored.rows @ direction  # of an empty place 0, which is below any threshold
        at = int(cosine.argmax())
        return at, float(cosine[at])

    def _touch(self, stored: _StoredAnswers, at: int) -> None:
        self._counter += 1
        stored.used[at] = self._counter

    def lookup(self, space: Space, embedding: ArrayLike, now: float) -> str | None:
        """The answer to the nearest question of this space, if it is near enough."""
        stored, direction = self.spaces.get(space), self._direction(embedding)
        if stored is not None and direction is not None:
            at, cosine = self._nearest(stored, direction, now)
            if cosine >= self.threshold:
                self.hits += 1
                self._touch(stored, at)
                return stored.answers[at]
        self.misses += 1
        return None

    def store(self, space: Space, embedding: ArrayLike, answer: str, now: float) -> None:
        """Keep an answer; it takes the place of one to nearly the same question."""
        if (direction := self._direction(embedding)) is None:
            return
        stored = self.spaces.setdefault(space, _StoredAnswers(self.capacity, self.size))
        at, cosine = self._nearest(stored, direction, now)
        if cosine < self.threshold:
            at = int(stored.used.argmin())
        stored.rows[at], stored.answers[at], stored.until[at] = direction, answer, now + self.keep
        stored.soonest = min(stored.soonest, now + self.keep)
        self._touch(stored, at)

    def __len__(self) -> int:
        return sum(int((stored.used >= 0).sum()) for stored in self.spaces.values())


def threshold_for(cosines: Sequence[float], same: Sequence[bool], precision: float = 0.99) -> float:
    """The lowest threshold at which so many of the labelled pairs that it calls one are one.

    Raises
    ------
    UserError
        No threshold does, or there are no pairs.
    """
    order = np.argsort(-np.asarray(cosines, float), kind="stable")
    values, truth = np.asarray(cosines, float)[order], np.asarray(same, bool)[order]
    found = np.cumsum(truth) / np.arange(1, len(truth) + 1)
    ends = np.append(values[1:] != values[:-1], True) if len(values) else np.zeros(0, bool)  # ties stand together
    able = np.flatnonzero(ends & (found >= precision))
    if not len(able):
        raise UserError(
            f"no threshold has precision {precision:g} on {len(values)} pairs; label more, or ask for less",
            code="user.no-threshold",
        )
    return float(values[able[-1]])
