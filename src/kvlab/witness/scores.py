"""Scores of two predictions by the definitions, in numpy's float64, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
NUMBERS = 2**17  # of a prediction that are in float64 at once: more would leave the near cache


def log_softmax(logits: Floats) -> Floats:
    """Natural logarithm of each row's softmax."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def divergence(p: Floats, q: Floats) -> Floats:
    r"""KL divergence :math:`\sum_v p_v (\log p_v - \log q_v)` of each row, nats; from the logits of both."""
    return np.concatenate([_divergence(*logs) for logs in _logarithms(p, q)])


def scored(p: Floats, q: Floats, labels: NDArray) -> dict[str, NDArray]:
    """The columns of a table of scored tokens.

    Parameters
    ----------
    p, q : ndarray, shape (tokens, vocabulary)
        Logits without and with a codec; row t predicts ``labels[t]``.
    labels : ndarray of int, shape (tokens,)
    """
    blocks, first = [], 0
    for one, other in _logarithms(p, q):
        rows = np.arange(len(one))
        here = labels[first : first + len(one)]
        blocks.append(
            {
                "label": here,
                "nll_ref": -one[rows, here],
                "nll_alt": -other[rows, here],
                "kl": _divergence(one, other),
                "top1_ref": one.argmax(axis=-1),
                "top1_alt": other.argmax(axis=-1),
                "p_ref_max": np.exp(one.max(axis=-1)),
            }
        )
        first += len(one)
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _logarithms(p: Floats, q: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Logarithms of the probabilities that both logits stand for, float64, by blocks of rows."""
    rows = max(1, NUMBERS // p.shape[1])
    for first in range(0, len(p), rows):
        block = slice(first, first + rows)
        yield log_softmax(p[block].astype(np.float64)), log_softmax(q[block].astype(np.float64))


def _divergence(p: Floats, q: Floats) -> Floats:
    """KL of each row, from the logarithms of both probabilities."""
    return (np.exp(p) * (p - q)).sum(axis=-1)
