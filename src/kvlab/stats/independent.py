"""The difference of two estimates that were not made over the same windows."""

from __future__ import annotations

import math

from kvlab.stats.bootstrap import Estimate


def difference(a: Estimate, b: Estimate) -> Estimate:
    r"""`a` minus `b` with an interval made of both intervals (MOVER, the method of variance estimates recovery).

    .. math:: L = \hat\theta_a - \hat\theta_b - \sqrt{(\hat\theta_a - l_a)^2 + (u_b - \hat\theta_b)^2}, \quad
        U = \hat\theta_a - \hat\theta_b + \sqrt{(u_a - \hat\theta_a)^2 + (\hat\theta_b - l_b)^2}

    (Zou & Donner 2008, Statistics in Medicine 27:1693, section 2). Each end recovers the variance near the limit
    that it belongs to, so skewed intervals make a skewed one. The estimates are taken to be independent; if they
    are positively correlated, the interval is wider than it need be, and if negatively, too narrow.

    Parameters
    ----------
    a, b : Estimate
        Of one quantity in one unit, at the same confidence; neither a bound nor a rate that is exact.

    Returns
    -------
    Estimate
        Method ``mover``; windows and tokens are those of the estimate that has fewer.
    """
    value = a.value - b.value
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    high = value + math.hypot(a.high - a.value, b.value - b.low)
    fewer = min(a, b, key=lambda estimate: estimate.n_windows)
    documents = None if None in (a.n_documents, b.n_documents) else min(a.n_documents, b.n_documents)
    return Estimate(value, low, high, fewer.n_windows, fewer.n_tokens, "mover", fewer.confidence, documents)
