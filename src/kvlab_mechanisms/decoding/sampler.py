"""Drawing the next token of each request of a batch, by a number that only its seed and its step decide.

A draw is the inverse of the cumulative law: the first candidate whose cumulative mass exceeds u (Devroye 1986,
Non-uniform random variate generation, section III.2). Since u comes from Philox under the request's own seed, a
request gets the same tokens alone, in any batch and at any place in it, whatever the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvlab_mechanisms.decoding.law import Law, Order, Sampling, law
from kvlab_mechanisms.decoding.philox import uniform


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
