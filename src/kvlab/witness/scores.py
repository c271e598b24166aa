"""Scores of two predictions by the definitions, in numpy's float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def log_softmax(logits: Floats) -> Floats:
    """Natural logarithm of each row's softmax."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def divergence(p: Floats, q: Floats) -> Floats:
    r"""KL divergence :math:`\sum_v p_v (\log p_v - \log q_v)` of each row, nats; from the logarithms of both."""
    return (np.exp(p) * (p - q)).sum(axis=-1)


def scored(p: Floats, q: Floats, labels: NDArray) -> dict[str, NDArray]:
    """The columns of a table of scored tokens.

    Parameters
    ----------
    p, q : ndarray of float64, shape (tokens, vocabulary)
        Logarithms of the probabilities without and with a codec; row t predicts ``labels[t]``.
    labels : ndarray of int, shape (tokens,)
    """
    rows = np.arange(len(labels))
    return {
        "label": labels,
        "nll_ref": -p[rows, labels],
        "nll_alt": -q[rows, labels],
        "kl": divergence(p, q),
        "top1_ref": p.argmax(axis=-1),
        "top1_alt": q.argmax(axis=-1),
        "p_ref_max": np.exp(p.max(axis=-1)),
    }
