"""Random numbers that are a function of a seed and a place, so that no draw depends on what was drawn beside it.

Philox4x32-10 of Salmon, Moraes, Dror & Shaw 2011 (Parallel random numbers: as easy as 1, 2, 3, SC'11, section 3.3):
ten rounds of a keyed bijection of 128-bit counters. The key is a request's seed; the counter says which token of the
request is drawn, what the number is for, and which of several it is.
"""

from __future__ import annotations

import numpy as np

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
