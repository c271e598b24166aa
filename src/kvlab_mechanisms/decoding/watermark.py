"""A watermark by keyed green lists, and its detection.

Kirchenbauer et al. 2023 (2301.10226, algorithm 2) and 2024 (2306.04634: contexts of several tokens, WinMax). After a
context c a share gamma of the vocabulary is green, and the logits of green tokens are raised by delta. Who holds the
key counts the green tokens of a text: without a watermark their number is binomial.

Whether token x is green after c is asked of a keyed pseudo-random function, so that one token costs one hash, where a
list made by a permutation costs the whole vocabulary:

.. math:: \\mathrm{green}(x | c) \\iff h(h(x) \\oplus h(c \\oplus k)) < \\gamma 2^{64}

with h the finaliser of SplitMix64 (Steele, Lea & Flood 2014, OOPSLA, figure 17). It hides the key from nobody who
sets out to find it; ``secure`` takes keyed BLAKE2b (RFC 7693) for the context instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from scipy import special
from torch import Tensor
from transformers import LogitsProcessor

from kvlab.core.errors import ParamsError

FULL = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15  # added first, so that 0 is no fixed point


def mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser of each entry, uint64: a bijection."""
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64, and numpy says so of scalars
        x = x + np.uint64(GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=4)
def hashed_vocabulary(tokens: int) -> np.ndarray:
    """Hashes of all tokens, uint64 [tokens], which hang on no context."""
    found = mixed(np.arange(tokens, dtype=np.uint64))
    found.flags.writeable = False
    return found


@dataclass(frozen=True)
class Watermark:
    """What marks a text and finds it again.

    Parameters
    ----------
    key : int
        64 bits, secret.
    gamma : float in (0, 1)
        Share of the vocabulary that is green.
    delta : float
        Added to green logits.
    width : int
        Tokens of a context.
    secure : bool
        Contexts are hashed by keyed BLAKE2b, one at a time.
    """

    key: int
    gamma: float = 0.5
    delta: float = 2.0
    width: int = 1
    secure: bool = False

    def __post_init__(self):
        if not (0 < self.gamma < 1 and self.width >= 1 and 0 <= self.key < FULL and math.isfinite(self.delta)):
            raise ParamsError(
                f"a watermark of gamma {self.gamma}, width {self.width} and delta {self.delta}; allowed: gamma between"
                " 0 and 1, a width from 1, a finite delta, a key of 64 bits"
            )

    def contexts(self, ids: np.ndarray) -> np.ndarray:
        """Keyed hashes of contexts [..., width] of token ids, uint64 [...]; the order of a context's tokens counts."""
        ids = np.asarray(ids).astype(np.uint64)
        if self.secure:
            key = self.key.to_bytes(8, "big")
            flat = [
                hashlib.blake2b(row.tobytes(), key=key, digest_size=8).digest() for row in ids.reshape(-1, self.width)
            ]
            return np.array([int.from_bytes(digest, "big") for digest in flat], np.uint64).reshape(ids.shape[:-1])
        state = np.full(ids.shape[:-1], self.key, np.uint64)
        for place in range(self.width):
            state = mixed(ids[..., place] ^ state)
        return state

    def green(self, tokens: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """Whether tokens are green after contexts, as `contexts` hashes them; both broadcast."""
        return self._below(mixed(np.asarray(tokens).astype(np.uint64)), contexts)

    def green_list(self, size: int, contexts: np.ndarray) -> np.ndarray:
        """`green` of all tokens of a vocabulary, whose own hashes are kept, bool [..., size]."""
        return self._below(hashed_vocabulary(size), contexts[..., None])

    def _below(self, hashed: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        return mixed(hashed ^ contexts) < np.uint64(int(self.gamma * FULL))

    def marked(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Logits [rows, vocabulary] with delta on the green ones; as they are while a text is shorter than a context.

        Parameters
        ----------
        ids : int64 Tensor [rows, tokens]
            The texts so far.
        """
        if ids.shape[1] < self.width:
            return logits
        after = self.contexts(ids[:, -self.width :].cpu().numpy())
        green = torch.from_numpy(self.green_list(logits.shape[1], after)).to(logits.device)
        return torch.where(green, logits + self.delta, logits)

    def detect(self, ids: Sequence[int] | np.ndarray) -> Detection:
        """Count the green tokens of a text; a context with its token counts once however often it is repeated."""
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) <= self.width:
            return Detection(self.gamma, np.zeros(0, bool))
        grams = np.lib.stride_tricks.sliding_window_view(ids, self.width + 1)
        grams = grams[np.sort(np.unique(grams, axis=0, return_index=True)[1])]  # first occurrences, in their order
        return Detection(self.gamma, self.green(grams[:, -1], self.contexts(grams[:, :-1])))


@dataclass(frozen=True)
class PermutationWatermark(Watermark):
    """A watermark with the lists that transformers' ``WatermarkLogitsProcessor`` makes.

    The "lefthash" of the authors' code: the token before seeds a permutation of the whole vocabulary, whose beginning
    is green. Detection makes one permutation for each context.

    Parameters
    ----------
    key : int
        Its ``hashing_key``.
    vocabulary : int
        As the processor was told.
    """

    vocabulary: int = 50_000

    def __post_init__(self):
        super().__post_init__()
        if self.width != 1 or self.secure:
            raise ParamsError(
                "lists by permutation are of width 1 and have no secure hash", code="params.permutation-lists"
            )

    def contexts(self, ids: np.ndarray) -> np.ndarray:
        """Seeds of the generator that permutes, uint64."""
        seeds = [self.key * int(last) % (FULL - 1) for last in np.asarray(ids)[..., -1].ravel()]
        return np.array(seeds, np.uint64).reshape(np.shape(ids)[:-1])

    def green(self, tokens: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """See `Watermark`."""
        tokens, contexts = np.broadcast_arrays(tokens, contexts)
        found = np.zeros(tokens.shape, bool)
        for seed in np.unique(contexts):
            here = contexts == seed
            found[here] = self._list(int(seed))[tokens[here]]
        return found

    def green_list(self, size: int, contexts: np.ndarray) -> np.ndarray:
        """See `Watermark`."""
        return self.green(np.arange(size), contexts[..., None])

    def _list(self, seed: int) -> np.ndarray:
        generator = torch.Generator().manual_seed(seed)
        listed = np.zeros(self.vocabulary, bool)
        listed[torch.randperm(self.vocabulary, generator=generator)[: int(self.vocabulary * self.gamma)].numpy()] = True
        return listed


@dataclass(frozen=True)
class Detection:
    """What was counted in a text.

    Attributes
    ----------
    gamma : float
        Share of green that no watermark leads to.
    green : bool array [scored]
        Of each n-gram that was scored; empty for a text that is too short to be.
    """

    gamma: float
    green: np.ndarray

    @property
    def scored(self) -> int:
        """N-grams that were scored; 0 means that nothing is known."""
        return len(self.green)

    @cached_property
    def z(self) -> float:
        """Green beyond what is expected, in standard deviations; NaN where nothing was scored."""
        if not self.scored:
            return math.nan
        beyond = int(self.green.sum()) - self.gamma * self.scored
        return beyond / math.sqrt(self.scored * self.gamma * (1 - self.gamma))

    @cached_property
    def p_value(self) -> float:
        """Probability of as many green tokens without the key: the exact binomial tail; 1 where nothing was scored."""
        found = int(self.green.sum())
        return float(special.betainc(found, self.scored - found + 1, self.gamma)) if found else 1.0

    def best_window(self, least: int = 20) -> tuple[int, int, float]:
        """The part of the text with the highest z: its begin, its end and z (WinMax, 2306.04634, section 4.1).

        A maximum over many parts is higher than z of the whole without any watermark: it says where, not whether.
        """
        sums = np.concatenate([[0], np.cumsum(self.green)])
        begin, end = np.triu_indices(self.scored + 1, min(least, self.scored))
        if not self.scored:
            return 0, 0, math.nan
        scores = (sums[end] - sums[begin] - self.gamma * (end - begin)) / np.sqrt(
            self.gamma * (1 - self.gamma) * (end - begin)
        )
        at = int(scores.argmax())
        return int(begin[at]), int(end[at]), float(scores[at])


class WatermarkProcessor(LogitsProcessor):
    """The watermark in transformers' `generate`."""

    def __init__(self, watermark: Watermark):
        self.watermark = watermark

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See `Watermark.marked`."""
        return self.watermark.marked(scores, input_ids)
