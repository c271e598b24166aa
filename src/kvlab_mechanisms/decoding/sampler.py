"""Drawing the next token of each request of a batch, by a number that only its seed and its step decide.

A draw is the inverse of the cumulative law: the first candidate whose cumulative mass exceeds u (Devroye 1986,
Non-uniform random variate generation, section III.2). The numbers u are a function of a seed and a place, so that no
draw depends on what was drawn beside it: a request gets the same tokens alone, in any batch and at any place in it,
whatever the engine.

Philox4x32-10 of Salmon, Moraes, Dror & Shaw 2011 (Parallel random numbers: as easy as 1, 2, 3, SC'11, section 3.3):
ten rounds of a keyed bijection of 128-bit counters. The key is a request's seed; the counter says which token of the
request is drawn, what the number is for, and which of several it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from kvlab_mechanisms.decoding.law import Law, Order, Sampling, law

Words = int | np.ndarray  # 32-bit words: one, or an array of uint64 that holds one in each entry

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round: golden ratio and sqrt(3) - 1
MASK = 0xFFFFFFFF

TARGET, DRAFTER, NOISE = range(3)
"""What a number is for. Streams of different purposes are independent under one seed and step."""


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    r"""One block of four 32-bit words.

    .. math:: (c_0, c_1, c_2, c_3) \gets (\mathrm{hi}(m_1 c_2) \oplus c_1 \oplus k_0,\ \mathrm{lo}(m_1 c_2),\
        \mathrm{hi}(m_0 c_0) \oplus c_3 \oplus k_1,\ \mathrm{lo}(m_0 c_0))

    ten times, with the key bumped by the Weyl constants between rounds.

    Parameters
    ----------
    counter, key : tuples of int, or of uint64 arrays that broadcast
        32-bit words, least significant first.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & MASK, (low >> 32) ^ c3 ^ k1, low & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def uniform(seed: int, step: int, draw: Words = 0, purpose: int = TARGET) -> float | np.ndarray:
    """Uniform numbers in [0, 1) with 53 bits.

    Parameters
    ----------
    seed : int
        Of the request; its lowest 64 bits count.
    step : int
        Tokens that the request has made so far.
    draw : int or uint64 array
        Which of several numbers for one step; an array gives as many numbers, each what the entry alone would give.
    purpose : int
        One of the streams named above.
    """
    counter = (draw, purpose, step & MASK, (step >> 32) & MASK)
    a, b, _, _ = philox(counter, (seed & MASK, (seed >> 32) & MASK))
    return ((a << 21) | (b >> 11)) * 2.0**-53


def uniforms(seed: int, step: int, count: int, purpose: int = TARGET) -> np.ndarray:
    """The first `count` numbers of a step, float64 [count]."""
    return uniform(seed, step, np.arange(count, dtype=np.uint64), purpose)


def sample(
    logits: Tensor,
    settings: Sequence[Sampling],
    steps: Sequence[int],
    seen: Sequence[Tensor] | None = None,
    order: Order = "hf",
) -> Tensor:
    """One token for each row.

    Parameters
    ----------
    logits, settings, seen, order
        See `law`.
    steps : sequence of int
        Tokens that each request has made so far.

    Returns
    -------
    int64 Tensor [rows], on the CPU
    """
    u = np.array([uniform(own.seed, step) for own, step in zip(settings, steps, strict=True)])
    return torch.from_numpy(drawn(law(logits, settings, seen, order), u))


def drawn(found: Law, u: np.ndarray) -> np.ndarray:
    """The candidates that uniform numbers [rows] fall on, int64 [rows]; one without mass is never drawn."""
    up_to = np.cumsum(found.p, axis=1)
    total = up_to[:, -1]
    # below the total also where the product is rounded up to it
    at = np.minimum(u * total, np.nextafter(total, 0))[:, None]
    return np.take_along_axis(found.ids, (up_to <= at).sum(axis=1, keepdims=True), axis=1)[:, 0]


class SamplerLogitsProcessor(LogitsProcessor):
    """The sampler in transformers' `generate`.

    It draws each row's token itself and leaves it as the only one, so that `generate`, sampling or not, takes it.

        processor = SamplerLogitsProcessor([Sampling(0.8, top_k=50, seed=7)])
        model.generate(ids, do_sample=False, logits_processor=[processor])

    A processor serves one call of `generate`: what is there at the first token is the prompt. With padding on the left
    a row's tokens are what they are alone, but for the penalty, which transformers too lets see the padding.

    Parameters
    ----------
    settings : sequence of Sampling
        One for each row.
    order : {"hf", "vllm"}
    """

    def __init__(self, settings: Sequence[Sampling], order: Order = "hf"):
        self.settings, self.order, self._prompt = list(settings), order, -1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, vocabulary]: 0 at the token that was drawn, minus infinity elsewhere."""
        if self._prompt < 0:
            self._prompt = input_ids.shape[1]
        step = input_ids.shape[1] - self._prompt
        u = np.array([uniform(own.seed, step) for own in self.settings])
        tokens = torch.from_numpy(drawn(law(scores, self.settings, list(input_ids), self.order), u))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None].to(scores.device), 0.0)


class LawProcessor(LogitsProcessor):
    """The filters alone, as log-probabilities; `generate` draws with torch's own random numbers."""

    def __init__(self, settings: Sequence[Sampling], order: Order = "hf"):
        self.settings, self.order = list(settings), order

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, vocabulary]."""
        found = law(scores, self.settings, list(input_ids), self.order)
        return found.dense(scores.shape[1]).log().to(scores.device, scores.dtype)
