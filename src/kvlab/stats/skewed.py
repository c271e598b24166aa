"""How large a mean may be when few of its items are known and the rest may be skewed.

The KL of windows is skewed: most windows cost little, a few cost a lot, and of 16 windows the few may not be among
them. The bootstrap and Student's t see the scatter of what was drawn, and their upper ends are too low several times as
often as they say (``python -m validation.gate_error``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

BEYOND = 1.0
"""How far an item that was not seen may lie beyond the largest, in distances of the largest from the median."""


def upper_means(values: ArrayLike, levels: ArrayLike) -> NDArray[np.float64]:
    r"""Upper confidence bounds for a mean, of any distribution whose items end not far beyond the largest seen.

    With probability at least 1 - a the true distribution lies nowhere more than
    :math:`d = \sqrt{\ln(1/a) / 2n}` below the empirical one (Dvoretzky, Kiefer & Wolfowitz, one side, with Massart's
    constant: 1990, Annals of Probability 18:1269). So the mean is at most that of the values of which the smallest,
    a share d of all, are put where the largest possible item lies (Anderson 1969, Confidence limits for the value of
    an arbitrary bounded random variable, Stanford technical report).

    Parameters
    ----------
    values : float [n]
    levels : float [levels], each at most 0.5
        How often each bound may be too low.

    Returns
    -------
    float64 [levels]
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n, most = ordered.size, ordered[-1] + BEYOND * (ordered[-1] - np.median(ordered))
    moved = np.minimum(1.0, np.sqrt(np.log(1 / np.asarray(levels, dtype=np.float64)) / (2 * n)))
    kept = np.clip(np.arange(1, n + 1) / n - moved[:, None], 0, 1 / n)
    return kept @ ordered + moved * most
